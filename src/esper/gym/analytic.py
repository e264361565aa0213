"""The problem of `simic/analytic.py`: no network is trained, and the best policy is known."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from gymnasium import spaces

from esper.gym.problem import Observed, Problem
from esper.leyline import HOLDS_SEED, ActionMasks, generator
from esper.simic import analytic


@cache
def solution() -> analytic.Solution:
    """The best policy of the analytic problem and its value, by dynamic programming."""
    return analytic.solve()


class AnalyticProblem(Problem):
    length = analytic.HORIZON

    def __init__(self, n_envs: int) -> None:
        super().__init__(
            n_envs,
            [f"slot {slot}" for slot in range(analytic.NUM_SLOTS)],
            [f"blueprint {number}" for number in range(analytic.NUM_BLUEPRINTS)],
            spaces.Box(0.0, 1.0, (analytic.OBSERVATION_DIM,), np.float32),
        )
        self.env = analytic.AnalyticGrowth(n_envs)

    def reset(self, keys: Sequence[int]) -> Observed:
        observations, masks = self.env.begin([generator(key, "analytic") for key in keys])
        self.actions = np.zeros((self.n_envs, len(self.sizes)), dtype=np.int64)
        self.returns, self.history = np.zeros(self.n_envs), []
        return self._observe(observations, masks)

    def step(self, actions: np.ndarray) -> tuple[Observed, np.ndarray, bool]:
        observations, masks, rewards, terminated, _ = self.env.step(actions)
        self.actions, self.returns = actions, self.returns + rewards
        return self._observe(observations, masks), rewards, bool(terminated.all())

    def _observe(self, observations: np.ndarray, masks: ActionMasks) -> Observed:
        first, second = self.env.states.T
        self.history.append(((self.returns / solution().optimum + 1.0) / 3.0, self.env.stages))
        best = solution().value[self.env.time, first, second]
        return Observed(observations, masks, {"optimal_value": best})

    def headline(self, env: int, action: str) -> str:
        return f"step {self.env.time} of {self.length}, {action}, return {self.returns[env]:+.2f}"

    def describe_seed(self, env: int, slot: int) -> str:
        state = analytic.STATES[self.env.states[env, slot]]
        return self.blueprints[state.blueprint] if HOLDS_SEED[state.stage] else ""
