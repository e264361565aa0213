"""Host trainings with a decision after every epoch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces

from esper.growth.blueprints.catalogue import default_catalogue
from esper.gym.choices import in_words
from esper.gym.problem import Seen
from esper.gym.rendering import Look
from esper.leyline import BLEND_NAMES, NUM_OPS, SeedStage
from esper.leyline.growth_settings import Budget, GrowthSettings, Incubation
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
from esper.tolaria.tasks import find_task
from esper.tolaria.tasks.base import Task

REWARD = "objective"


@lru_cache(maxsize=1)
def _data(task: Task) -> DataSplits:
    """Read once for all environments of a task: agents like to make many of them."""
    return task.load(data_root())


@contextmanager
def _learning() -> Iterator[None]:
    """Agents act without gradients, and call us while they do; hosts cannot learn without."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


class GrowthProblem:
    """E hosts, each trained for an epoch between two decisions.

    task         by name (`esper tasks`), or a `Task` of your own
    steps        decisions in an episode; None: as many as the task says
    incubation   'isolated': a seed learns without acting before it is blended in; 'joint': it acts
                 from birth
    max_params, max_macs   caps on the grown network, as multiples of the host or, above 100, as
                 numbers; `max_seeds` caps its seeds at a time; None: no cap
    population   how several hosts are trained: 'looped', 'fused' or 'auto', by a rule
    reward       settings of the objective: score_weight, param_cost, compute_cost, rollback_penalty

    Raises ConfigError for settings that cannot work, DataMissingError without the data set.
    """

    def __init__(
        self,
        n_envs: int,
        *,
        task: str | Task = "digits",
        steps: int | None = None,
        incubation: str = "isolated",
        max_params: float | None = None,
        max_macs: float | None = None,
        max_seeds: int | None = None,
        population: str = "auto",
        reward: Mapping[str, Any] | None = None,
    ) -> None:
        self.n_envs = n_envs
        self.task = find_task(task) if isinstance(task, str) else task
        self.reward = make_reward(REWARD, reward or {}, (REWARD,))
        self.recipe = self.task.recipe(_data(self.task))
        self.rules = GrowthSettings(
            self.task.steps if steps is None else steps,
            incubation=cast(Incubation, incubation),
            budget=Budget(params=max_params, macs=max_macs),
            max_seeds=max_seeds,
            # As in `esper grow`; and copies whose episodes are equally long can step together.
            on_panic="continue",
            keep_best=False,
            schedule=self.task.schedule,
            population=choose_population(self.recipe, n_envs, population),
        )
        self.blueprints = tuple(default_catalogue().names)
        slots = len(self.task.slots)
        self.sizes: tuple[int, ...] = (slots, len(self.blueprints), len(BLEND_NAMES), NUM_OPS)
        width = feature_size(slots, len(self.blueprints))
        self.observation_space: spaces.Space[Any] = spaces.Box(-LIMIT, LIMIT, (width,), np.float32)

    def reset(self, keys: Sequence[int]) -> Seen:
        self.rows, self.past = wait(self.n_envs), list[tuple[np.ndarray, np.ndarray]]()
        with _learning():
            self.env = make_env(self.recipe, keys, self.rules)
            return self._see(self.env.reset())

    def step(self, rows: np.ndarray) -> tuple[Seen, np.ndarray, bool]:
        with _learning():
            transition = self.env.step(rows)
        self.rows = rows
        rewards = compute_reward(transition, self.reward, gamma=1.0).total
        return self._see(transition.after), rewards, not self.env.running.any()

    def _see(self, situation: Situation) -> Seen:
        signals = situation.signals
        self.past.append((signals.val_score, situation.table.stage))
        return Seen(
            signals_to_features(FeatureExtractionContext(situation)),
            situation.masks,
            {"val_score": signals.val_score.copy(), "params": situation.total_params.copy()},
        )

    def look(self, env: int) -> Look:
        s = self.env.situation
        assert s is not None
        table, names = s.table, self.task.slots
        headline = (
            f"{self.task.name}: step {s.step} of {s.max_steps}, "
            f"{in_words(self.rows[env], names, self.blueprints)}, "
            f"validation score {s.signals.val_score[env]:.2f}, {s.total_params[env]:,} parameters"
        )
        lines = []
        for slot, name in enumerate(names):
            line = f"{name}: {SeedStage(table.stage[env, slot]).name}"
            if table.holds_seed[env, slot]:
                blueprint = self.blueprints[table.blueprint[env, slot]]
                line += f" {blueprint}, alpha {table.alpha[env, slot]:.2f}"
            lines.append(line)
        heights = np.array([score[env] / 100.0 for score, _ in self.past])
        stages = np.array([stage[env] for _, stage in self.past])
        return Look(headline, tuple(lines), np.nan_to_num(heights), stages, s.max_steps + 1)
