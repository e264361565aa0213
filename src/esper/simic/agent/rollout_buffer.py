"""Where a round of decisions waits for the update: whole episodes, one row per environment."""

import numpy as np
import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES, ActionMasks, ConfigError
from esper.simic.agent.network import NetworkConfig
from esper.simic.agent.types import Decision, Hidden, MaskTensors, SequenceBatch


class TamiyoRolloutBuffer:
    """Room for `num_envs` episodes of at most `max_steps` steps, allocated once.

    `start` a round with the hidden state that the first decision will see and the groups of the
    environments, `add` a step at a time
    for the environments still running, then hand the buffer to `PPOAgent.update`. A row is one
    episode: it ends with a terminated or truncated step and takes no more. Of hidden states only
    the first of each row is kept, because an update replays the row from there, and the last one,
    to see how it fared.
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
        self.observations = self._room(network.observation_dim)
        self.groups = np.arange(num_envs)
        self.actions = self._room(heads, dtype=torch.long)
        self.log_probs = self._room(heads)
        self.values = self._room()
        self.rewards = self._room()
        self.terminated = self._room(dtype=torch.bool)
        self.truncated = self._room(dtype=torch.bool)
        self.bootstrap_values = self._room()
        # All legal where nothing was stored: padding has to be a distribution too.
        self.masks = MaskTensors(
            *(
                self._room(*shape, dtype=torch.bool).fill_(True)
                for shape in (
                    (network.num_ops,),
                    (network.num_ops, slots),
                    (slots, blueprints),
                    (network.num_blends,),
                )
            )
        )
        shape = (network.lstm_layers, num_envs, network.lstm_hidden_dim)
        self.hidden: Hidden = (
            torch.zeros(shape, device=self.device),
            torch.zeros(shape, device=self.device),
        )
        self.last_hidden: Hidden = (self.hidden[0].clone(), self.hidden[1].clone())
        self.step_counts = np.zeros(num_envs, dtype=np.int64)
        self.ended = np.zeros(num_envs, dtype=bool)

    def _room(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((self.num_envs, self.max_steps, *shape), dtype=dtype, device=self.device)

    def __len__(self) -> int:
        return int(self.step_counts.sum())

    def start(self, hidden: Hidden, groups: np.ndarray | None = None) -> None:
        """Empty every row and note the hidden state before its first step.

        Rows with one number in `groups` int[E] differ by nothing but their actions; without it
        each row is alone.
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
        """One step of every environment, arrays [E, ...]; rows outside `active` are left alone.

        `observations` are the normalised ones the policy saw, `masks` the ones it drew from.
        `bootstrap_values` is V of the state after the step, read where `truncated` only.
        """
        rows = np.arange(self.num_envs) if active is None else np.flatnonzero(active)
        self._check_room(rows)
        observed = self._tensor(observations)
        if not torch.isfinite(observed[rows]).all():
            raise ValueError("observations must be finite before they are stored, got NaN or inf")
        at = (torch.from_numpy(rows), torch.from_numpy(self.step_counts[rows]))
        given = MaskTensors.of(masks, self.device)
        for room, values in (
            (self.observations, observed),
            (self.actions, torch.from_numpy(decision.actions).to(self.device)),
            (self.log_probs, decision.log_probs),
            (self.values, decision.values),
            (self.rewards, self._tensor(rewards)),
            (self.terminated, torch.from_numpy(np.asarray(terminated, dtype=bool))),
            (self.truncated, torch.from_numpy(np.asarray(truncated, dtype=bool))),
            (self.bootstrap_values, self._tensor(bootstrap_values)),
            *zip(self.masks, given, strict=True),
        ):
            expected = (self.num_envs, *room.shape[2:])
            if values.shape != expected:
                raise ConfigError(
                    f"this buffer takes arrays {list(expected)} here, got {list(values.shape)}"
                )
            room[at] = values[rows].to(self.device)
        for last, new in zip(self.last_hidden, decision.hidden, strict=True):
            last[:, at[0]] = new[:, rows].to(self.device)
        self.step_counts[rows] += 1
        self.ended[rows] = (np.asarray(terminated) | np.asarray(truncated))[rows]

    def _check_room(self, rows: np.ndarray) -> None:
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
        """The rows that hold steps, cut to the longest; refuses an episode that has no end."""
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

        def cut(room: Tensor) -> Tensor:
            return room[rows, :longest]

        def zeroed(room: Tensor) -> Tensor:
            """Steps beyond a row's end hold what an earlier round left there."""
            return cut(room).masked_fill(~valid, 0)

        return SequenceBatch(
            groups=torch.from_numpy(self.groups[filled]).to(self.device),
            observations=cut(self.observations),
            actions=cut(self.actions),
            log_probs=cut(self.log_probs),
            values=zeroed(self.values),
            rewards=zeroed(self.rewards),
            terminated=zeroed(self.terminated),
            truncated=zeroed(self.truncated),
            bootstrap_values=zeroed(self.bootstrap_values),
            masks=MaskTensors(*(cut(mask) for mask in self.masks)),
            valid=valid,
            hidden=(self.hidden[0][:, rows], self.hidden[1][:, rows]),
        )
