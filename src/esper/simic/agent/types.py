"""Data types of the agent: masks, decisions and batches."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import ActionMasks

Hidden = tuple[Tensor, Tensor]


class MaskTensors(NamedTuple):
    """`leyline.ActionMasks` as bool tensors with any leading axes: [E, ...] or [N, T, ...]."""

    op: Tensor
    slot: Tensor
    blueprint: Tensor
    blend: Tensor

    @staticmethod
    def of(masks: ActionMasks, device: torch.device | str = "cpu") -> "MaskTensors":
        arrays = (masks.op, masks.slot, masks.blueprint, masks.blend)
        return MaskTensors(*(torch.tensor(a, dtype=torch.bool, device=device) for a in arrays))

    def rows(self, rows: Tensor) -> "MaskTensors":
        return MaskTensors(*(mask[rows] for mask in self))


@dataclass(frozen=True)
class Decision:
    """One decision for each of E environments; heads in the order of HEAD_NAMES.

    actions    [E, 4]  index 0 for heads that the drawn op ignores
    log_probs  [E, 4]  exactly 0 for those heads
    values     [E]
    hidden     the state of the LSTM after this step
    """

    actions: np.ndarray
    log_probs: Tensor
    values: Tensor
    hidden: Hidden


@dataclass(frozen=True)
class SequenceBatch:
    """Whole episodes, one per row: tensors [N, T, ...], `valid[n, t]` where row n has a step t.

    Rows with the same number in `groups` [N] differ only in their actions.
    """

    groups: Tensor
    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    bootstrap_values: Tensor
    masks: MaskTensors
    valid: Tensor
    hidden: Hidden

    def rows(self, rows: Tensor) -> "SequenceBatch":
        """The chosen episodes, each with its own initial hidden state."""
        others = {"masks", "hidden"}
        return SequenceBatch(
            **{name: value[rows] for name, value in vars(self).items() if name not in others},
            masks=self.masks.rows(rows),
            hidden=(self.hidden[0][:, rows], self.hidden[1][:, rows]),
        )
