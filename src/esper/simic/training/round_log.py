"""The records of a round, its time and memory, and the scaling of its rewards."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from esper.leyline import ActionMasks, History, NullRecorder, RoundRecorder
from esper.leyline.events import Event, GovernorSnapshot
from esper.simic.agent.rollout import Step, TamiyoRolloutBuffer, VectorEnv
from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd
from esper.simic.telemetry.profiler import resident_mb

# Phases of a round; `hosts` is training and evaluating them.
PHASES = ("hosts", "reward", "policy", "update", "validation", "telemetry", "checkpoint")


class Clock:
    """Seconds of one round by phase. A phase inside another interrupts it: nothing counts twice.

    The results of a phase must be in host memory when it ends, so that the device has finished.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.current: str | None = None
        self.began = self.mark = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        outer, self.current = self.current, name
        try:
            # So that traces of the profiler show phases.
            with record_function(name):
                yield
        finally:
            self._charge()
            self.current = outer

    def _charge(self) -> None:
        now = time.perf_counter()
        if self.current is not None:
            self.seconds[self.current] += now - self.mark
        self.mark = now

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count time that was measured in a worker for another phase."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def row(self, env_steps: int) -> dict[str, Any]:
        total = time.perf_counter() - self.began
        phases = {f"seconds.{name}": self.seconds[name] for name in PHASES}
        return {"seconds": total, "steps_per_second": env_steps / total, **phases}


class RoundLog(History):
    """The records of one round: passed on to `record` at once, and kept until the next round.

    Snapshots of the governor, one per environment and step, are kept only with `detailed`.
    """

    def __init__(self, record: RoundRecorder | None = None) -> None:
        self.record = record or NullRecorder()
        super().__init__(listeners=(self.record,))
        self.clock, self.detailed = Clock(), True

    def begin(self, round_: int, *, detailed: bool) -> None:
        self.clear()
        self.clock, self.detailed = Clock(), detailed
        self.record.begin_round(round_)

    def keeps(self, event: Event) -> bool:
        return self.detailed or not isinstance(event, GovernorSnapshot)

    def event(self, event: Event) -> None:
        if self.keeps(event):
            super().event(event)

    def end(self, env_steps: int) -> dict[str, Any]:
        """Record the row of timings at the end of the round."""
        row = self.clock.row(env_steps) | {"memory_mb": resident_mb()}
        self.record.timing(row)
        return row


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
        scaled, own = np.where(self.running, raw, 0.0), self.running
        if self.rewards is not None and own.any():
            scaled[own] = self.rewards(torch.from_numpy(scaled[own].astype(np.float64))).numpy()
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
