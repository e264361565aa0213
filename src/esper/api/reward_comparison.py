"""Compare two rewards: for each key one policy per reward, judged by the scores of their hosts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from esper.api.training import (
    ValidationHosts,
    Workers,
    choose_task,
    config_of,
    one_thread,
    resume_ppo,
    train_ppo,
)
from esper.leyline import ConfigError, EsperError, draw_key
from esper.observatory.run_directory import CONFIG
from esper.proof.statistics import PairedDifference, paired_difference, require_scipy
from esper.simic.training.checkpoint import is_run, load_state
from esper.simic.training.config import TrainingConfig
from esper.simic.training.policy_controller import LearnedController
from esper.simic.training.state import TrainState, lasting_settings
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.run import play_run
from esper.tolaria.tasks import Task

COMPARISON = "comparison.json"
# A result that chance brings about less often than this counts as a difference.
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class RewardComparison:
    """`scores` has, for each of the two `rewards`, the mean validation score of hosts that its
    policies grew, one number per key. Returns of different rewards are never compared."""

    rewards: tuple[str, str]
    keys: tuple[int, ...]
    scores: tuple[tuple[float, ...], tuple[float, ...]]
    difference: PairedDifference

    @property
    def verdict(self) -> str:
        n, p = self.difference.n, self.difference.p
        least = 2.0 / 2**n
        if p is None or least > SIGNIFICANT:
            return f"too few keys for a verdict: with {n}, p cannot be below {least:.2g}; use 6"
        if p > SIGNIFICANT:
            return f"no difference shown (p = {p:.2g})"
        better = self.rewards[0 if self.difference.mean > 0 else 1]
        return f"{better} is better (p = {p:.2g})"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


@one_thread()
def compare_rewards(
    first: TrainingConfig,
    second: TrainingConfig,
    out: str | Path,
    *,
    keys: Sequence[int],
    hosts: int = 16,
    resume: bool = False,
    workers: Workers = None,
    task: Task | None = None,
    on_policy: Callable[[str, int, float], None] = lambda reward, key, score: None,
) -> RewardComparison:
    """Train a policy with each config for each of `keys`, and compare the scores that they reach.

    The configs may differ in `reward_mode` and `reward` only. Policies of one key start with the
    same weights, train on the same hosts, and are then scored with their most probable actions on
    the same `hosts` new hosts, or on the validation hosts of the family. The runs, and
    `comparison.json`, are in the folder `out`; with `resume` a comparison that was stopped goes on.
    `on_policy` is called with the reward, the key and the score of each policy.
    """
    require_scipy()
    _check(first, second, keys)
    out, rewards = Path(out), (first.reward_mode, second.reward_mode)
    if out.exists() and any(out.iterdir()) and not resume:
        raise ConfigError(f"{out} is not empty; continue with resume, or choose another folder")
    scores: dict[str, list[float]] = {reward: [] for reward in rewards}
    for key in keys:
        for config in (replace(first, key=key), replace(second, key=key)):
            folder = out / f"{config.reward_mode}-{key}"
            state = _trained(config, folder, workers, task)
            score = _score(config, state, hosts, folder, task)
            scores[config.reward_mode].append(score)
            on_policy(config.reward_mode, key, score)
    one, two = (tuple(scores[reward]) for reward in rewards)
    found = RewardComparison(rewards, tuple(keys), (one, two), paired_difference(one, two))
    (out / COMPARISON).write_text(json.dumps(found.as_dict(), indent=1), encoding="utf-8")
    return found


def _check(first: TrainingConfig, second: TrainingConfig, keys: Sequence[int]) -> None:
    if first.reward_mode == second.reward_mode:
        raise ConfigError(f"both reward modes are {first.reward_mode!r}; give another one")
    one, two = first.flat(), second.flat()
    for name in {**one, **two}:
        if one.get(name) != two.get(name) and not name.startswith("reward"):
            raise ConfigError(f"the configs differ in {name}; only their rewards may differ")
    if len(keys) < 2 or len(set(keys)) < len(keys):
        raise ConfigError(f"a comparison needs two or more different keys, got {list(keys)}")


def _trained(
    config: TrainingConfig, folder: Path, workers: Workers, task: Task | None
) -> TrainState:
    """The policy in the folder, trained to its end."""
    if not (folder / CONFIG).is_file():
        return train_ppo(config, folder, task=task, workers=workers)
    found = config_of(folder)
    kind = found.growth.population
    wanted = replace(config, growth=replace(config.growth, population=kind))
    if lasting_settings(found) != lasting_settings(wanted) or found.rounds != config.rounds:
        raise ConfigError(f"{folder} was trained with other settings; choose another folder")
    if is_run(folder) and (state := load_state(folder)).round == config.rounds:
        return state
    return resume_ppo(folder, task=task, workers=workers)


def _score(
    config: TrainingConfig,
    state: TrainState,
    hosts: int,
    folder: Path,
    task: Task | None,
) -> float:
    task, family = choose_task(config, task)
    data, kind = task.load(data_root()), state.settings["growth.population"]
    growth = replace(config.growth, population=kind)
    if family is not None:
        return ValidationHosts(replace(config, growth=growth), family, data, folder).score(state)
    rules = replace(growth, steps=growth.steps or task.steps, schedule=task.schedule)
    keys = [draw_key(config.key, "comparison", host) for host in range(hosts)]
    played = play_run(task.recipe(data), keys, rules, LearnedController(state), task=task.name)
    known = [each.outcome.val_score for each in played if each.outcome.val_score is not None]
    if not known:
        raise EsperError(f"no host of the policy in {folder} could be trained to a score")
    return float(np.mean(known))
