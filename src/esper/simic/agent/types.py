"""What passes between the parts of the agent: masks, decisions, batches and metrics."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES, ActionMasks

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
    hidden     the state of the LSTM after this step, to pass to the next one
    """

    actions: np.ndarray
    log_probs: Tensor
    values: Tensor
    hidden: Hidden


@dataclass(frozen=True)
class SequenceBatch:
    """Whole episodes, one per row: arrays [N, T, ...], `valid[n, t]` where row n has a step t."""

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
        apart = ("masks", "hidden")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        return SequenceBatch(
            **{name: value[rows] for name, value in plain.items()},
            masks=self.masks.rows(rows),
            hidden=(self.hidden[0][:, rows], self.hidden[1][:, rows]),
        )


@dataclass
class MetricLists:
    """What one update sees, collected minibatch by minibatch."""

    policy_loss: list[float] = field(default_factory=list)
    value_loss: list[float] = field(default_factory=list)
    approx_kl: list[float] = field(default_factory=list)
    clip_fraction: list[float] = field(default_factory=list)
    ratio_outliers: list[float] = field(default_factory=list)
    ratio_mean: list[float] = field(default_factory=list)
    ratio_std: list[float] = field(default_factory=list)
    ratio_max: list[list[float]] = field(default_factory=list)
    ratio_min: list[list[float]] = field(default_factory=list)
    head_entropies: list[list[float]] = field(default_factory=list)
    head_counts: list[list[float]] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    head_grad_norms: list[list[float]] = field(default_factory=list)

    def add(self, seen: dict[str, Any]) -> None:
        """Append what one minibatch showed under the names that are collected."""
        for name in {f.name for f in fields(self)} & seen.keys():
            getattr(self, name).append(seen[name])


@dataclass(frozen=True)
class PPOUpdateMetrics:
    """What one update did, in scalars; docs/ppo.md says what a bad value looks like.

    `None` means that there was nothing to measure, for example the entropy of a head that no
    chosen op made relevant.
    """

    steps: int
    optimizer_steps: int = 0
    skipped: str | None = None
    early_stop_epoch: int | None = None
    replay_error: float | None = None
    policy_loss: float | None = None
    value_loss: float | None = None
    entropy: float | None = None
    entropy_coef: float | None = None
    approx_kl: float | None = None
    approx_kl_max: float | None = None
    clip_fraction: float | None = None
    ratio_mean: float | None = None
    ratio_std: float | None = None
    ratio_max: float | None = None
    ratio_min: float | None = None
    ratio_worst_head: str | None = None
    ratio_outliers: float | None = None
    explained_variance: float | None = None
    advantage_mean: float | None = None
    advantage_std: float | None = None
    advantage_min: float | None = None
    advantage_max: float | None = None
    grad_norm: float | None = None
    grad_norm_max: float | None = None
    head_entropies: dict[str, float | None] = field(default_factory=dict)
    head_grad_norms: dict[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """One flat row: the dictionaries as `slot_entropy`, `slot_grad_norm`, ..."""
        row = asdict(self)
        for head, value in row.pop("head_entropies").items():
            row[f"{head}_entropy"] = value
        for head, value in row.pop("head_grad_norms").items():
            row[f"{head}_grad_norm"] = value
        return row


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def summarize(collected: MetricLists, **scalars: Any) -> PPOUpdateMetrics:
    """Scalars of an update from its lists: means, but true extremes for ratios, KL and norms.

    A scalar that is not finite was not measured: a skipped update has such.
    """
    summary: dict[str, Any] = {
        name: _mean(getattr(collected, name))
        for name in (
            "policy_loss",
            "value_loss",
            "approx_kl",
            "clip_fraction",
            "ratio_outliers",
            "ratio_mean",
            "ratio_std",
            "grad_norm",
        )
    }
    if collected.approx_kl:
        summary["approx_kl_max"] = max(collected.approx_kl)
        summary |= _ratio_extremes(collected)
        summary |= _entropies(collected)
    if collected.grad_norm:
        summary["grad_norm_max"] = max(collected.grad_norm)
        norms = np.mean(collected.head_grad_norms, axis=0)
        summary["head_grad_norms"] = dict(zip((*HEAD_NAMES, "value"), norms.tolist(), strict=True))
    summary |= scalars
    return PPOUpdateMetrics(**{name: _measured(value) for name, value in summary.items()})


def _measured(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ratio_extremes(collected: MetricLists) -> dict[str, Any]:
    highest = np.max(collected.ratio_max, axis=0)
    lowest = np.min(collected.ratio_min, axis=0)
    # A ratio that underflowed to 0 is infinitely far from 1, and so the worst.
    with np.errstate(divide="ignore"):
        worst = np.argmax(np.maximum(np.log(highest), -np.log(lowest)))
    return {
        "ratio_max": float(highest.max()),
        "ratio_min": float(lowest.min()),
        "ratio_worst_head": HEAD_NAMES[worst],
    }


def _entropies(collected: MetricLists) -> dict[str, Any]:
    """Entropy of each head over the steps where it mattered, and over all heads and steps."""
    counts = np.asarray(collected.head_counts)
    sums = (np.asarray(collected.head_entropies) * counts).sum(axis=0)
    totals = counts.sum(axis=0)
    heads = [float(s / n) if n else None for s, n in zip(sums, totals, strict=True)]
    return {
        "head_entropies": dict(zip(HEAD_NAMES, heads, strict=True)),
        "entropy": float(sums.sum() / totals.sum()),
    }
