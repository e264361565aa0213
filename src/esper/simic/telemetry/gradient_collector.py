"""Health of gradients: measured with few operations and one transfer, and how it drifts."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from esper.leyline import ConfigError
from esper.leyline import constants as c


@dataclass(frozen=True)
class GradientThresholds:
    """Norms of single parameter tensors, before clipping, that count as vanishing or exploding."""

    vanishing: float
    exploding: float

    @staticmethod
    def for_clip_norm(max_grad_norm: float) -> "GradientThresholds":
        """What is small or large is measured against the norm that a step may have."""
        if not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0, got {max_grad_norm}")
        return GradientThresholds(
            vanishing=c.VANISHING_PER_CLIP_NORM * max_grad_norm,
            exploding=c.EXPLODING_PER_CLIP_NORM * max_grad_norm,
        )


@dataclass(frozen=True)
class GradientHealthMetrics:
    """Gradients of n tensors. `norm` is the norm of all of them together.

    zero_fraction   share of elements that are exactly 0
    health          1 is good: 1 - 0.5 share vanishing - 0.8 share exploding, 0 with NaN or infinity
    """

    tensors: int
    norm: float
    vanishing: int
    exploding: int
    zero_fraction: float
    nan_count: int
    inf_count: int

    @property
    def is_finite(self) -> bool:
        return self.nan_count == self.inf_count == 0

    @property
    def health(self) -> float:
        if not self.is_finite:
            return 0.0
        loss = 0.5 * self.vanishing / self.tensors + 0.8 * self.exploding / self.tensors
        return max(0.0, 1.0 - loss)


@dataclass(frozen=True)
class PendingGradientMetrics:
    """Measured but still on the device (one row per device and dtype): `result` waits for it."""

    tensors: int
    elements: int
    rows: list[Tensor]

    def result(self) -> GradientHealthMetrics:
        return self.read([row.tolist() for row in self.rows])

    def read(self, rows: list[list[float]]) -> GradientHealthMetrics:
        """The result from `self.rows` as lists, for who fetches them along with other numbers."""
        columns = list(zip(*rows, strict=True))
        squares, vanishing, exploding, zeros, nans, infs = columns
        return GradientHealthMetrics(
            tensors=self.tensors,
            norm=sum(squares) ** 0.5,
            vanishing=int(sum(vanishing)),
            exploding=int(sum(exploding)),
            zero_fraction=sum(zeros) / self.elements,
            nan_count=int(sum(nans)),
            inf_count=int(sum(infs)),
        )


@torch.compiler.disable
@torch.no_grad()
def start_collecting(
    params: Iterable[nn.Parameter], thresholds: GradientThresholds
) -> PendingGradientMetrics | None:
    """Measure without waiting for the device; None if no parameter has a gradient."""
    grads = [p.grad for p in params if p.grad is not None and p.grad.numel()]
    if not grads:
        return None
    groups = _group_tensors_by_device_and_dtype([list[Tensor | None](grads)])
    rows = [_measure(cast(list[Tensor], group[0]), thresholds) for group, _ in groups.values()]
    return PendingGradientMetrics(len(grads), sum(g.numel() for g in grads), rows)


@torch.compiler.disable
def collect_gradients(
    params: Iterable[nn.Parameter], thresholds: GradientThresholds
) -> GradientHealthMetrics | None:
    """Health of the gradients of `params`; None if there are none."""
    pending = start_collecting(params, thresholds)
    return None if pending is None else pending.result()


def _measure(grads: list[Tensor], thresholds: GradientThresholds) -> Tensor:
    """float64 [6]; the tensors share a device and dtype."""
    norms = torch.stack(torch._foreach_norm(grads)).double()
    flat = _flatten_dense_tensors(grads)
    return torch.stack(
        [
            norms.square().sum(),
            (norms < thresholds.vanishing).sum().double(),
            (norms > thresholds.exploding).sum().double(),
            (flat == 0).sum().double(),
            flat.isnan().sum().double(),
            flat.isinf().sum().double(),
        ]
    )


@dataclass(frozen=True)
class GradientDrift:
    """|x - mean| / mean of the norm and of the health; None while there is no mean, or no x."""

    norm: float | None
    health: float | None


class GradientEMATracker:
    """Exponential moving averages of gradient norm and health.

    What is None or not finite is left out: it would poison the mean of all later updates.
    """

    def __init__(self, momentum: float = 0.99, epsilon: float = 1e-8) -> None:
        if not 0.0 < momentum < 1.0:
            raise ValueError(f"momentum must lie between 0 and 1, got {momentum}")
        self.momentum, self.epsilon = momentum, epsilon
        self.norm: float | None = None
        self.health: float | None = None

    def update(self, norm: float | None, health: float | None) -> GradientDrift:
        """Drift against the means so far; then the readings join them."""
        drift = GradientDrift(self._drift(norm, self.norm), self._drift(health, self.health))
        self.norm = self._join(norm, self.norm)
        self.health = self._join(health, self.health)
        return drift

    def _drift(self, value: float | None, mean: float | None) -> float | None:
        if value is None or mean is None or not math.isfinite(value):
            return None
        return abs(value - mean) / (mean + self.epsilon)

    def _join(self, value: float | None, mean: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return mean
        return value if mean is None else self.momentum * mean + (1.0 - self.momentum) * value

    def state_dict(self) -> dict[str, float | None]:
        return {"norm": self.norm, "health": self.health}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.norm, self.health = state["norm"], state["health"]
