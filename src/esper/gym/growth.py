"""Host trainings with a decision after every epoch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from esper.growth.blueprints.catalogue import default_catalogue
from esper.gym.problem import Observed, Problem
from esper.leyline.growth_settings import GrowthSettings
from esper.simic.rewards.modes import compute_reward
from esper.simic.training.config import make_reward
from esper.tamiyo.policy.features import (
    LIMIT,
    FeatureExtractionContext,
    feature_size,
    signals_to_features,
)
from esper.tamiyo.situation import Situation, wait
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.run import make_env
from esper.tolaria.fused.choice import choose_population
from esper.tolaria.tasks import Task, find_task

REWARD = "objective"


@lru_cache(maxsize=1)
def _data(task: Task) -> DataSplits:
    """Read once for all environments of a task."""
    return task.load(data_root())


@contextmanager
def _gradients() -> Iterator[None]:
    """Agents often call `step` with gradients disabled, but hosts need them to train."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


class GrowthProblem(Problem):
    """E hosts, each trained for an epoch between two decisions.

    task         by name (`esper tasks`), or a `Task` of your own
    settings     how hosts are trained and grow; `changes` are settings by name, such as steps=20
                 or budget={"params": 1.5}. Default: those of the task
    reward       settings of the objective: score_weight, param_cost, compute_cost, rollback_penalty

    Raises ConfigError for settings that cannot work, DataMissingError without the data set.
    """

    def __init__(
        self,
        n_envs: int,
        *,
        task: str | Task = "digits",
        settings: GrowthSettings | None = None,
        reward: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        if "frameskip" in changes:
            # TorchRL tries it with every environment, and leaves it out after this error.
            raise TypeError("got an unexpected keyword argument 'frameskip'")
        self.task = find_task(task) if isinstance(task, str) else task
        self.reward = make_reward(REWARD, reward or {})
        self.recipe = self.task.recipe(_data(self.task))
        usual = GrowthSettings(schedule=self.task.schedule, population="auto")
        own = (settings or usual).updated(changes)
        self.length = own.steps or self.task.steps
        self.rules = replace(
            own,
            steps=self.length,
            keep_best=False,
            population=choose_population(self.recipe, n_envs, own.population),
        )
        slots, blueprints = self.task.slots, tuple(default_catalogue().names)
        width = feature_size(len(slots), len(blueprints))
        super().__init__(n_envs, slots, blueprints, spaces.Box(-LIMIT, LIMIT, (width,), np.float32))

    def reset(self, keys: Sequence[int]) -> Observed:
        self.actions = wait(self.n_envs)
        with _gradients():
            self.env = make_env(self.recipe, keys, self.rules)
            return self._observe(self.env.reset())

    def step(self, actions: np.ndarray) -> tuple[Observed, np.ndarray, bool]:
        with _gradients():
            transition = self.env.step(actions)
        self.actions = actions
        rewards = compute_reward(transition, self.reward, gamma=1.0).total
        return self._observe(transition.after), rewards, not self.env.running.any()

    def _observe(self, situation: Situation) -> Observed:
        self.situation, score = situation, situation.signals.val_score
        self.stages = situation.table.stage
        return Observed(
            signals_to_features(FeatureExtractionContext(situation)),
            situation.masks,
            {"val_score": score.copy(), "params": situation.total_params.copy()},
        )

    def headline(self, env: int, action: str) -> str:
        s = self.situation
        return (
            f"{self.task.name}: step {s.step} of {s.max_steps}, {action}, "
            f"validation score {s.signals.val_score[env]:.2f}, {s.total_params[env]:,} parameters"
        )

    def describe_seed(self, env: int, slot: int) -> str:
        table = self.situation.table
        if not table.holds_seed[env, slot]:
            return ""
        blueprint = self.blueprints[table.blueprint[env, slot]]
        return f"{blueprint}, alpha {table.alpha[env, slot]:.2f}"
