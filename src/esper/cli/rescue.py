"""`esper grow --start trained`: train a host, then spend a little more on it in every way."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esper.cli.arms import Arms
    from esper.proof.arms import Plan
    from esper.tamiyo.situation import Controller
    from esper.tolaria.engine.run import Trained, TrialRules
    from esper.tolaria.tasks.base import Task

HOST, CONTINUE, COOLED, SCRATCH = "trained host", "continue", "cooled", "best scratch"


def rescue(arms: "Arms", task: "Task", controller: "Controller", rules: "TrialRules") -> None:
    """Train the host and every way to go on; Ctrl-C ends it with the arms that are finished.
    Of `rules` those that say how seeds grow count: their budget and their incubation."""
    from esper.api import one_thread
    from esper.proof.arms import host_plan
    from esper.proof.scenarios import RescuePlans

    settings = arms.settings
    rescues = RescuePlans(task, arms.data, arms.steps, settings.extra)
    with one_thread(), arms.open("grown", settings.folder) as record:
        try:
            host = _whole(arms.beside(HOST, host_plan(task, arms.steps)))
            plan = rescues.continued(host, controller)
            own = replace(plan.rules, budget=rules.budget, incubation=rules.incubation)
            _whole(arms.play("grown", replace(plan, rules=own), record))
            if settings.compare:
                _whole(arms.beside(CONTINUE, rescues.continued(host, cooling=False)))
                _whole(arms.beside(COOLED, rescues.continued(host)))
                plans: list[Plan] = rescues.from_scratch()
                if plans:
                    _whole(arms.beside(SCRATCH, arms.best_of(SCRATCH, plans)))
        except KeyboardInterrupt:
            arms.forget_unfinished()
            if "grown" not in arms.trained:
                raise


def _whole(trained: "Trained") -> "Trained":
    """Half an arm is no result."""
    if trained.outcome.ended == "interrupted":
        raise KeyboardInterrupt
    return trained
