"""Explain one decision of a run: from its record, or, for training runs, by playing it again."""

from pathlib import Path
from typing import Any

import numpy as np

from esper.api.checks import TASK, checked
from esper.api.training import config_of, one_thread
from esper.leyline import (
    BLEND_NAMES,
    BLUEPRINT,
    OP,
    SLOT,
    ConfigError,
    History,
    InvalidStateMachineError,
    LifecycleOp,
)
from esper.leyline.actions import BLEND
from esper.leyline.events import Decided
from esper.observatory.explain import (
    EpisodeRecord,
    explain_decision,
    is_evaluation,
    read_episode,
    read_evaluation_episode,
)
from esper.simic.training.checkpoint import load_checkpoint
from esper.simic.training.env_specs import episode_env
from esper.simic.training.policy_controller import LearnedController
from esper.tamiyo.controllers import controller_names
from esper.tamiyo.situation import Situation, wait
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.run import play
from esper.tolaria.tasks import find_task
from esper.tolaria.tasks.base import Task

CLOSE = 1e-4  # of a score: what another order of sums may change


@checked(task=TASK)
def explain(
    run: str | Path,
    *,
    step: int,
    env: int = 0,
    round: int | None = None,
    arm: str | None = None,
    key: int | None = None,
    task: Task | None = None,
) -> dict[str, Any]:
    """What a controller saw, thought and did before the epoch `step`, and what came of it.

    The decisions of a growth run are read from its record. A training run does not keep them: the
    episode is played again with the actions that were taken, and its newest policy is asked about
    each; `round` is the newest complete one by default, and `task` stands in for the one that the
    run names. Of an evaluation `arm` and `key` name the episode. Raises ConfigError if there is no
    such run, round, environment, arm, key or step.
    """
    evaluated = is_evaluation(Path(run))
    if not evaluated and (arm is not None or key is not None):
        raise ConfigError(f"{run} is no evaluation; leave out --arm and --key")
    if evaluated:
        record = read_evaluation_episode(Path(run), arm, key)
    else:
        record = read_episode(Path(run), env, round)
    if record.kind == "training":
        explain_decision(record, step, None, ())  # finds out whether there is such a step
        with one_thread():
            return explain_decision(record, step, *_played_again(record, step, task))
    decision = record.decision(step)
    how = ["From the record of the run."]
    if decision is None:
        how = _why_nothing(str(record.config.get("controller", record.kind)))
    return explain_decision(record, step, decision, how)


def _why_nothing(controller: str) -> list[str]:
    if controller.partition(":")[0] in controller_names():
        return [
            f"The controller {controller} is a rule: it has no probabilities and no value.",
            "What it went by are the signals and events that are told here.",
        ]
    return [f"The record has no thoughts of {controller}, only what was seen and done."]


class Retold:
    """Takes the actions of a record, and asks a policy what it thinks of them."""

    def __init__(self, record: EpisodeRecord, policy: LearnedController) -> None:
        self.record, self.policy, self.name = record, policy, policy.name

    def reset(self, n_envs: int) -> None:
        self.policy.reset(n_envs)

    def act(self, situation: Situation) -> np.ndarray:
        self.policy.act(situation)
        row = self.record.steps[situation.step + 1]
        actions = wait(1)
        actions[0, OP] = LifecycleOp[str(row["op"])]
        for head, name, names in (
            (SLOT, "slot", situation.slot_config.names),
            (BLUEPRINT, "blueprint", situation.catalogue.names),
            (BLEND, "blend", BLEND_NAMES),
        ):
            if row.get(name) is not None:
                actions[0, head] = list(names).index(row[name])
        if not situation.masks.allows(actions).all():
            raise InvalidStateMachineError(f"{row['op']} is not legal before step {row['step']}")
        return actions

    def reasons(self, actions: np.ndarray) -> list[Decided]:
        return self.policy.reasons(actions)


def _played_again(
    record: EpisodeRecord, step: int, task: Task | None
) -> tuple[dict[str, Any], list[str]]:
    """The `Decided` event of a step of a training run, and how it was found."""
    assert record.round is not None
    config = config_of(record.folder)
    chosen = task or find_task(config.task)
    checkpoint = load_checkpoint(record.folder)
    told = History()
    env = episode_env(config, chosen, chosen.load(data_root()), record.round, record.env, told)
    controller = Retold(record, LearnedController(checkpoint.state))
    try:
        play(env, controller, after_epoch=lambda env: env.step_count < step)
    except (KeyError, ValueError, InvalidStateMachineError) as error:
        raise ConfigError(
            f"round {record.round} of {record.folder} cannot be played again: what was done in "
            f"environment {record.env} cannot be done here ({error})"
        ) from error
    decided = [e for e in told.events if isinstance(e, Decided) and e.step == step]
    if not decided:
        raise ConfigError(f"played again, environment {record.env} ended before step {step}")
    how = [
        f"Training runs keep no decisions: round {record.round} was played again, with the actions "
        "of its record.",
        f"The thoughts are those of the policy in {checkpoint.path.name}.",
        _fidelity(record, told),
    ]
    return decided[0].row() | {"env": record.env}, how


def _fidelity(record: EpisodeRecord, told: History) -> str:
    for row in told.rows:
        was, now = record.steps[row["step"]].get("val_score"), row["val_score"]
        if (was is None) != (now is None) or (was is not None and abs(was - now) > CLOSE):
            return (
                f"It did not go as recorded: the score of epoch {row['step']} was {now}, not "
                f"{was}; another version or machine may be the reason."
            )
    return "It went as recorded."
