"""What the agent sees of an environment: observations and rewards on scales it can work with."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from esper.leyline import ActionMasks
from esper.simic.agent.rollout import VectorEnv
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd
from esper.simic.training.round_log import Clock

# Returns whose deviation is below this share of their mean do not differ.
SAME = 1e-6


class ScaledEnv:
    """A `VectorEnv` for one round, around another one. The only place that normalises.

    Statistics take in the raw observations that will be acted on, then scale them; rewards the
    same, each environment with the normaliser of its reward mode. Environments whose episode is
    over take no part. `returns` sums up raw rewards. Without `rewards` they are left as they are,
    for `scale_returns` when the round is over.
    """

    def __init__(
        self,
        env: VectorEnv,
        observations: RunningMeanStd,
        rewards: Mapping[str, RewardNormalizer] | None,
        mode_of: Callable[[int], str],
        clock: Clock,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.env, self.num_envs, self.groups = env, env.num_envs, env.groups
        self.observations, self.rewards = observations, rewards
        self.modes = np.array([mode_of(env) for env in range(self.num_envs)])
        self.clock, self.on_step = clock, on_step
        self.running = np.ones(self.num_envs, dtype=bool)
        self.returns = np.zeros(self.num_envs)
        self.steps = 0

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        with self.clock.phase("hosts"):
            observations, masks = self.env.reset(round_)
        return self._observe(observations), masks

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]:
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
        """Only what will be acted on is learnt from; what nobody looks at again is 0."""
        values = torch.as_tensor(raw, dtype=torch.float32)
        self.observations.update(values[torch.from_numpy(self.running)])
        looked_at = self.running if ended is None else self.running | ended
        return np.where(looked_at[:, None], self.observations.normalize(values).numpy(), 0.0)

    def _reward(self, raw: np.ndarray) -> np.ndarray:
        if self.rewards is None:
            return np.where(self.running, raw, 0.0)
        scaled = np.zeros(self.num_envs)
        for mode, normalizer in self.rewards.items():
            own = self.running & (self.modes == mode)
            if own.any():
                scaled[own] = normalizer(torch.from_numpy(raw[own].astype(np.float64))).numpy()
        return scaled


def scale_returns(
    buffer: TamiyoRolloutBuffer,
    normalizers: Mapping[str, RewardNormalizer],
    modes: np.ndarray,
    gamma: float,
) -> None:
    """Divide the rewards of a round in `buffer` by the running deviation of the returns.

    Of the returns from every step on, those of this round included, for each of the reward `modes`
    [E] apart: they are what a critic learns, so its errors are of the order of 1 whatever rewards
    are, and however seldom one is paid. Nothing is clipped. What follows a truncated step is not
    part of them.
    """
    played = np.arange(buffer.max_steps) < buffer.step_counts[:, None]
    rewards = np.where(played, buffer.rewards.cpu().numpy(), 0.0)
    returns = rewards.astype(np.float64)
    for step in reversed(range(buffer.max_steps - 1)):
        returns[:, step] += gamma * returns[:, step + 1]
    for mode, normalizer in normalizers.items():
        own = modes == mode
        normalizer.update(torch.from_numpy(returns[own][played[own]]))
        # Equal but for rounding is equal: there is no scale in them.
        if normalizer.std > SAME * max(1.0, abs(normalizer.mean)):
            buffer.rewards[torch.from_numpy(own)] /= normalizer.std
