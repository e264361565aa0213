"""`esper grow --start trained`: train a host, then compare what more compute can make of it."""

from dataclasses import replace
from typing import TYPE_CHECKING

from esper.cli.arms import GROWN

if TYPE_CHECKING:
    from esper.cli.arms import Arms
    from esper.leyline.growth_settings import GrowthSettings
    from esper.proof.arms import Plan
    from esper.tamiyo.situation import Controller
    from esper.tolaria.engine.run import Trained
    from esper.tolaria.tasks.base import Task

HOST, CONTINUE, COOLED, SCRATCH = "trained host", "continue", "cooled", "best scratch"


def rescue(arms: "Arms", task: "Task", controller: "Controller") -> None:
    """Train the host and every arm; Ctrl-C ends it with the arms that are finished."""
    from esper.proof.arms import host_plan
    from esper.proof.rescue import Ways

    steps = arms.growth.steps or task.steps
    ways = Ways(task, arms.data, steps, arms.settings.extra)
    try:
        host = _whole(arms.play(HOST, host_plan(task, steps)))
        plan = ways.going_on(host, controller)
        _whole(arms.play(GROWN, replace(plan, rules=_as_asked(arms, plan))))
        if arms.settings.compare:
            _whole(arms.play(CONTINUE, ways.going_on(host, cooling=False)))
            _whole(arms.play(COOLED, ways.going_on(host)))
            plans: list[Plan] = list(ways.from_scratch().values())
            if plans:
                _whole(arms.play(SCRATCH, arms.best_of(SCRATCH, plans)))
    except KeyboardInterrupt:
        arms.forget_unfinished()
        if GROWN not in arms.trained:
            raise


def _as_asked(arms: "Arms", plan: "Plan") -> "GrowthSettings":
    """The settings of the command within the compute that the plan allows; the schedule of the
    learning rate is the same for all arms."""
    rules = plan.rules
    return replace(
        arms.growth,
        steps=rules.steps,
        schedule=rules.schedule,
        max_train_macs=rules.max_train_macs,
        extra=rules.extra,
    )


def _whole(trained: "Trained") -> "Trained":
    """Half an arm is no result."""
    if trained.outcome.ended == "interrupted":
        raise KeyboardInterrupt
    return trained
