"""Explain one decision of a run, from its record or by replaying an episode of training."""

from pathlib import Path
from typing import Any

import numpy as np

from esper.api.checks import TASK, checked
from esper.api.training import choose_task, config_of, one_thread
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
from esper.leyline.events import Decided
from esper.leyline.stages import BLEND
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
from esper.tolaria.tasks import Task

CLOSE = 1e-4  # scores of a replay may differ by this much: another order of sums


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
    """What a controller observed and decided before the epoch `step`, and what followed.

    The decisions of a growth run are read from its record. A training run does not keep them: the
    episode is replayed with the recorded actions, and the newest policy of the run gives its
    probabilities for each decision. `round` is the newest complete one by default; `task` replaces
    the one that the run names. `arm` and `key` select an episode of an evaluation. Raises
    ConfigError if there is no such run, round, environment, arm, key or step.
    """
    if is_evaluation(Path(run)):
        record = read_evaluation_episode(Path(run), arm, key)
    elif arm is not None or key is not None:
        raise ConfigError(f"{run} is no evaluation; leave out --arm and --key")
    else:
        record = read_episode(Path(run), env, round)
    if record.kind == "training":
        explain_decision(record, step, None, ())  # raises ConfigError if there is no such step
        with one_thread():
            return explain_decision(record, step, *_replay(record, step, task))
    decision = record.decision(step)
    how = ["From the record of the run."]
    if decision is None:
        controller = str(record.config.get("controller", record.kind))
        how = [f"The record has no probabilities of {controller}, only observations and actions."]
        if controller.partition(":")[0] in controller_names():
            how = [
                f"The controller {controller} is a rule: it has no probabilities and no value.",
                "It decides by the signals and events that are listed here.",
            ]
    return explain_decision(record, step, decision, how)


class ReplayController:
    """Repeats the actions of a record, and lets a policy give its probabilities for them."""

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


def _replay(
    record: EpisodeRecord, step: int, task: Task | None
) -> tuple[dict[str, Any], list[str]]:
    """The `Decided` event of a step of a training run, and a description of how it was found."""
    assert record.round is not None
    config = config_of(record.folder)
    chosen, _ = choose_task(config, task)
    checkpoint = load_checkpoint(record.folder)
    replayed = History()
    env = episode_env(config, chosen, chosen.load(data_root()), record.round, record.env, replayed)
    controller = ReplayController(record, LearnedController(checkpoint.state))
    try:
        play(env, controller, after_epoch=lambda env: env.step_count < step)
    except (KeyError, ValueError, InvalidStateMachineError) as error:
        raise ConfigError(
            f"round {record.round} of {record.folder} cannot be replayed: the actions of "
            f"environment {record.env} are not possible here ({error})"
        ) from error
    decided = [e for e in replayed.events if isinstance(e, Decided) and e.step == step]
    if not decided:
        raise ConfigError(f"environment {record.env} ended before step {step} in the replay")
    how = [
        f"Training runs keep no decisions: round {record.round} was replayed with its recorded "
        "actions.",
        f"The probabilities are those of the policy in {checkpoint.path.name}.",
        _fidelity(record, replayed),
    ]
    return decided[0].row() | {"env": record.env}, how


def _fidelity(record: EpisodeRecord, replayed: History) -> str:
    for row in replayed.rows:
        was, now = record.steps[row["step"]].get("val_score"), row["val_score"]
        if (was is None) != (now is None) or (was is not None and abs(was - now) > CLOSE):
            return (
                f"The replay differs from the record: the score of epoch {row['step']} was {now}, "
                f"not {was}; another version or machine may be the reason."
            )
    return "The replay agrees with the record."
