"""The problem of `simic/analytic.py`: no network is trained, and the best policy is known."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from gymnasium import spaces

from esper.gym.choices import in_words
from esper.gym.problem import Seen
from esper.gym.rendering import Look
from esper.leyline import HOLDS_SEED, NUM_OPS, ActionMasks, generator
from esper.simic import analytic


@cache
def solution() -> analytic.Solution:
    """The best policy of the analytic problem and what it is worth, by dynamic programming."""
    return analytic.solve()


class AnalyticProblem:
    """E copies of it; a key says what is random in an episode."""

    def __init__(self, n_envs: int) -> None:
        self.n_envs = n_envs
        self.env = analytic.AnalyticGrowth(n_envs)
        self.sizes: tuple[int, ...] = (
            analytic.NUM_SLOTS,
            analytic.NUM_BLUEPRINTS,
            analytic.NUM_BLENDS,
            NUM_OPS,
        )
        width = analytic.OBSERVATION_DIM
        self.observation_space: spaces.Space[Any] = spaces.Box(0.0, 1.0, (width,), np.float32)

    def reset(self, keys: Sequence[int]) -> Seen:
        observations, masks = self.env.begin([generator(key, "analytic") for key in keys])
        self.rows = np.zeros((self.n_envs, len(self.sizes)), dtype=np.int64)
        self.returns = np.zeros(self.n_envs)
        self.past = list[tuple[np.ndarray, np.ndarray]]()
        return self._see(observations, masks)

    def step(self, rows: np.ndarray) -> tuple[Seen, np.ndarray, bool]:
        observations, masks, rewards, terminated, _ = self.env.step(rows)
        self.rows, self.returns = rows, self.returns + rewards
        return self._see(observations, masks), rewards, bool(terminated.all())

    def _see(self, observations: np.ndarray, masks: ActionMasks) -> Seen:
        first, second = self.env.states.T
        self.past.append((self.returns, self.env.stages))
        best = solution().value[self.env.time, first, second]
        return Seen(observations, masks, {"optimal_value": best})

    def look(self, env: int) -> Look:
        slots = tuple(f"slot {slot}" for slot in range(analytic.NUM_SLOTS))
        blueprints = tuple(f"blueprint {number}" for number in range(analytic.NUM_BLUEPRINTS))
        headline = (
            f"step {self.env.time} of {analytic.HORIZON}, "
            f"{in_words(self.rows[env], slots, blueprints)}, return {self.returns[env]:+.2f}"
        )
        lines = []
        for name, index in zip(slots, self.env.states[env], strict=True):
            state = analytic.STATES[index]
            line = f"{name}: {state.stage.name}"
            if HOLDS_SEED[state.stage]:
                line += f" {blueprints[state.blueprint]}"
            lines.append(line)
        optimum = solution().optimum
        heights = np.array([(total[env] / optimum + 1.0) / 3.0 for total, _ in self.past])
        stages = np.array([stage[env] for _, stage in self.past])
        return Look(headline, tuple(lines), heights, stages, analytic.HORIZON + 1)
