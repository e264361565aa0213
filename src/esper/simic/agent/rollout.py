"""Rollouts: the buffer of whole episodes, one row per environment, and the loop that fills it."""

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES, ActionMasks, ConfigError, generator
from esper.simic.agent.network import NetworkConfig
from esper.simic.agent.types import Decision, Hidden, MaskTensors, SequenceBatch

if TYPE_CHECKING:
    from esper.simic.agent.ppo import PPOAgent

# Observations, masks, rewards, terminated, truncated, each for all environments.
Step = tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]


class TamiyoRolloutBuffer:
    """Storage for `num_envs` episodes of at most `max_steps` steps, allocated once.

    `start` a round, `add` one step at a time, then pass the buffer to `PPOAgent.update`. A row is
    one episode: it ends with a terminated or truncated step and takes no more. Of each row the
    first hidden state is kept, from which an update replays it, and the last one for telemetry.
    """

    def __init__(
        self,
        num_envs: int,
        max_steps: int,
        network: NetworkConfig,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_envs < 1 or max_steps < 1:
            raise ConfigError(
                f"a buffer needs at least one environment and one step, "
                f"got {num_envs} and {max_steps}"
            )
        self.num_envs = num_envs
        self.max_steps = max_steps
        self.network = network
        self.device = torch.device(device)
        slots, blueprints, heads = network.num_slots, network.num_blueprints, len(HEAD_NAMES)
        self.observations = self._zeros(network.observation_dim)
        self.groups = np.arange(num_envs)
        self.actions = self._zeros(heads, dtype=torch.long)
        self.log_probs = self._zeros(heads)
        self.values = self._zeros()
        self.rewards = self._zeros()
        self.terminated = self._zeros(dtype=torch.bool)
        self.truncated = self._zeros(dtype=torch.bool)
        self.bootstrap_values = self._zeros()
        ops, blends = network.num_ops, network.num_blends
        shapes = ((ops,), (ops, slots), (slots, blueprints), (blends,))
        # Padding is all legal, because it has to be a distribution too.
        self.masks = MaskTensors(*(self._zeros(*s, dtype=torch.bool).fill_(True) for s in shapes))
        h = torch.zeros(network.lstm_layers, num_envs, network.lstm_hidden_dim, device=self.device)
        self.hidden: Hidden = (h, h.clone())
        self.last_hidden: Hidden = (h.clone(), h.clone())
        self.step_counts = np.zeros(num_envs, dtype=np.int64)
        self.ended = np.zeros(num_envs, dtype=bool)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((self.num_envs, self.max_steps, *shape), dtype=dtype, device=self.device)

    def __len__(self) -> int:
        return int(self.step_counts.sum())

    def start(self, hidden: Hidden, groups: np.ndarray | None = None) -> None:
        """Empty every row and store the hidden state before its first step.

        Rows with the same number in `groups` int[E] differ only in their actions; by default each
        row is a group.
        """
        groups = np.arange(self.num_envs) if groups is None else np.asarray(groups)
        if groups.shape != (self.num_envs,):
            raise ConfigError(
                f"this buffer needs the group of each of its {self.num_envs} environments, "
                f"got an array {list(groups.shape)}"
            )
        self.groups = groups.copy()
        self.step_counts[:] = 0
        self.ended[:] = False
        for own, given in zip(self.hidden, hidden, strict=True):
            if own.shape != given.shape:
                raise ConfigError(
                    f"the hidden state for this buffer is {list(own.shape)} "
                    f"(layers, environments, width), got {list(given.shape)}"
                )
            own.copy_(given)

    def add(
        self,
        observations: np.ndarray | Tensor,
        masks: ActionMasks,
        decision: Decision,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        bootstrap_values: np.ndarray | Tensor,
        active: np.ndarray | None = None,
    ) -> None:
        """Add one step of every environment, arrays [E, ...]; rows outside `active` are ignored.

        `observations` are normalised. `bootstrap_values` is V of the state after the step, read
        only where `truncated`.
        """
        rows = np.arange(self.num_envs) if active is None else np.flatnonzero(active)
        self._check_free(rows)
        observed = self._tensor(observations)
        if not torch.isfinite(observed[rows]).all():
            raise ValueError("observations must be finite before they are stored, got NaN or inf")
        at = (torch.from_numpy(rows), torch.from_numpy(self.step_counts[rows]))
        for stored, values in (
            (self.observations, observed),
            (self.actions, torch.from_numpy(decision.actions)),
            (self.log_probs, decision.log_probs),
            (self.values, decision.values),
            (self.rewards, self._tensor(rewards)),
            (self.terminated, torch.from_numpy(np.asarray(terminated, dtype=bool))),
            (self.truncated, torch.from_numpy(np.asarray(truncated, dtype=bool))),
            (self.bootstrap_values, self._tensor(bootstrap_values)),
            *zip(self.masks, MaskTensors.of(masks, self.device), strict=True),
        ):
            expected = (self.num_envs, *stored.shape[2:])
            if values.shape != expected:
                raise ConfigError(
                    f"this buffer takes arrays {list(expected)} here, got {list(values.shape)}"
                )
            stored[at] = values[rows].to(self.device)
        for last, new in zip(self.last_hidden, decision.hidden, strict=True):
            last[:, at[0]] = new[:, rows].to(self.device)
        self.step_counts[rows] += 1
        self.ended[rows] = (np.asarray(terminated) | np.asarray(truncated))[rows]

    def _check_free(self, rows: np.ndarray) -> None:
        full = rows[self.step_counts[rows] >= self.max_steps]
        if len(full):
            raise RuntimeError(
                f"environment {full[0]} already has {self.max_steps} steps, all this buffer holds"
            )
        over = rows[self.ended[rows]]
        if len(over):
            raise RuntimeError(
                f"the episode of environment {over[0]} is over; start the next round first"
            )

    def _tensor(self, values: np.ndarray | Tensor) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self.device)

    def sequences(self) -> SequenceBatch:
        """The rows with steps, cut to the longest; raises RuntimeError if one has not ended."""
        filled = np.flatnonzero(self.step_counts > 0)
        unfinished = filled[~self.ended[filled]]
        if len(unfinished):
            raise RuntimeError(
                f"the episode of environment {unfinished[0]} has not ended; mark its last step "
                "terminated, or truncated with a bootstrap value"
            )
        longest = int(self.step_counts[filled].max(initial=0))
        rows = torch.from_numpy(filled).to(self.device)
        counts = torch.from_numpy(self.step_counts[filled]).to(self.device)
        valid = torch.arange(longest, device=self.device) < counts[:, None]

        def cut(name: str) -> Tensor:
            return getattr(self, name)[rows, :longest]

        # Steps beyond the end of a row may hold values of an earlier round.
        zeroed = ("values", "rewards", "terminated", "truncated", "bootstrap_values")
        return SequenceBatch(
            groups=torch.from_numpy(self.groups[filled]).to(self.device),
            **{name: cut(name) for name in ("observations", "actions", "log_probs")},
            **{name: cut(name).masked_fill(~valid, 0) for name in zeroed},
            masks=MaskTensors(*(mask[rows, :longest] for mask in self.masks)),
            valid=valid,
            hidden=(self.hidden[0][:, rows], self.hidden[1][:, rows]),
        )


class VectorEnv(Protocol):
    """E environments that step together; steps after the end of an episode are ignored.

    Environments with the same number in `groups` int[E] begin with the same host and use the same
    data in the same order: they differ only in their actions.
    """

    num_envs: int
    groups: np.ndarray

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]: ...

    def step(self, actions: np.ndarray) -> Step: ...


def action_draws(key: int, round_: int, num_envs: int, steps: int) -> np.ndarray:
    """Uniform numbers [E, steps, heads], a function of (key, round, environment)."""
    shape = (steps, len(HEAD_NAMES))
    return np.stack(
        [generator(key, "action", round_, env).random(shape) for env in range(num_envs)]
    )


def play_round(
    agent: "PPOAgent",
    env: VectorEnv,
    buffer: TamiyoRolloutBuffer,
    round_: int,
    draws: np.ndarray | None,
) -> np.ndarray:
    """Fill `buffer` with one episode per environment; returns the sums of rewards [E].

    An episode that reaches the last step of the buffer is truncated there. Without `draws` the
    most probable actions are taken.
    """
    observations, masks = env.reset(round_)
    hidden = agent.initial_hidden(env.num_envs)
    buffer.start(hidden, env.groups)
    running = np.ones(env.num_envs, dtype=bool)
    returns = np.zeros(env.num_envs)
    no_value = torch.zeros(env.num_envs)
    for step in range(buffer.max_steps):
        uniforms = None if draws is None else draws[:, step]
        decision = agent.act(observations, hidden, masks, uniforms)
        before, hidden = (observations, masks), decision.hidden
        observations, masks, rewards, terminated, truncated = env.step(decision.actions)
        truncated = truncated | (~terminated & (step == buffer.max_steps - 1))
        bootstrap = agent.value(observations, hidden) if truncated.any() else no_value
        buffer.add(*before, decision, rewards, terminated, truncated, bootstrap, running)
        returns += rewards * running
        running &= ~(terminated | truncated)
        if not running.any():
            break
    return returns
