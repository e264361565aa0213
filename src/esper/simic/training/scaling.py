"""Normalised observations and rewards for the agent."""

from collections.abc import Callable

import numpy as np
import torch

from esper.leyline import ActionMasks
from esper.simic.agent.rollout import Step, VectorEnv
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd
from esper.simic.training.round_log import Clock

# Returns whose standard deviation is below this share of their mean count as equal.
EQUAL_RETURNS = 1e-6


class ScaledEnv:
    """A wrapper of a `VectorEnv` for one round. Only it and `scale_returns` normalise.

    Raw observations that the policy will act on update the statistics and are then scaled; so are
    rewards. Environments whose episode is over are left out. `returns` sums up raw rewards. Without
    `rewards` no reward is scaled; `scale_returns` does that after the round.
    """

    def __init__(
        self,
        env: VectorEnv,
        observations: RunningMeanStd,
        rewards: RewardNormalizer | None,
        clock: Clock,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.env, self.num_envs, self.groups = env, env.num_envs, env.groups
        self.observations, self.rewards = observations, rewards
        self.clock, self.on_step = clock, on_step
        self.running = np.ones(self.num_envs, dtype=bool)
        self.returns = np.zeros(self.num_envs)
        self.steps = 0

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        with self.clock.phase("hosts"):
            observations, masks = self.env.reset(round_)
        return self._observe(observations), masks

    def step(self, actions: np.ndarray) -> Step:
        with self.clock.phase("hosts"):
            observations, masks, rewards, terminated, truncated = self.env.step(actions)
        self.steps += 1
        self.on_step(self.steps)
        self.returns += np.where(self.running, rewards, 0.0)
        scaled = self._reward(rewards)
        ended = self.running & (terminated | truncated)
        self.running = self.running & ~ended
        return self._observe(observations, ended), masks, scaled, terminated, truncated

    def _observe(self, raw: np.ndarray, ended: np.ndarray | None = None) -> np.ndarray:
        """Only observations to act on update the statistics; those of episodes long over are 0."""
        values = torch.as_tensor(raw, dtype=torch.float32)
        self.observations.update(values[torch.from_numpy(self.running)])
        needed = self.running if ended is None else self.running | ended
        return np.where(needed[:, None], self.observations.normalize(values).numpy(), 0.0)

    def _reward(self, raw: np.ndarray) -> np.ndarray:
        if self.rewards is None:
            return np.where(self.running, raw, 0.0)
        scaled = np.zeros(self.num_envs)
        own = self.running
        if own.any():
            scaled[own] = self.rewards(torch.from_numpy(raw[own].astype(np.float64))).numpy()
        return scaled


def scale_returns(buffer: TamiyoRolloutBuffer, normalizer: RewardNormalizer, gamma: float) -> None:
    """Divide the rewards of a round in `buffer` by the running standard deviation of returns.

    The returns are those from every step on, including this round. The critic learns returns, so
    its errors are of the order of 1 however large or rare rewards are. Nothing is clipped. Returns
    end at a truncated step.
    """
    played = np.arange(buffer.max_steps) < buffer.step_counts[:, None]
    rewards = np.where(played, buffer.rewards.cpu().numpy(), 0.0)
    returns = rewards.astype(np.float64)
    for step in reversed(range(buffer.max_steps - 1)):
        returns[:, step] += gamma * returns[:, step + 1]
    normalizer.update(torch.from_numpy(returns[played]))
    if normalizer.std > EQUAL_RETURNS * max(1.0, abs(normalizer.mean)):
        buffer.rewards /= normalizer.std
