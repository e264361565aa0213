"""Health of a set of gradients, with a constant number of tensor operations and one transfer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from esper.leyline import ConfigError
from esper.leyline import constants as c

MAX_NORM_RATIO = 1000.0
MAX_ZERO_FRACTION = 0.5


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

    norm_ratio      largest over smallest norm of a tensor
    zero_fraction   share of elements that are exactly 0
    health          1 is good: 1 - 0.5 share vanishing - 0.8 share exploding, 0 with NaN or infinity
    """

    tensors: int
    norm: float
    min_layer_norm: float
    max_layer_norm: float
    vanishing: int
    exploding: int
    zero_fraction: float
    nan_count: int
    inf_count: int

    @property
    def norm_ratio(self) -> float:
        return self.max_layer_norm / max(self.min_layer_norm, 1e-10)

    @property
    def has_vanishing(self) -> bool:
        return self.vanishing > 0

    @property
    def has_exploding(self) -> bool:
        return self.exploding > 0

    @property
    def is_finite(self) -> bool:
        return self.nan_count == self.inf_count == 0

    @property
    def health(self) -> float:
        if not self.is_finite:
            return 0.0
        loss = 0.5 * self.vanishing / self.tensors + 0.8 * self.exploding / self.tensors
        return max(0.0, 1.0 - loss)

    @property
    def is_healthy(self) -> bool:
        return (
            self.is_finite
            and not self.has_exploding
            and self.norm_ratio < MAX_NORM_RATIO
            and self.zero_fraction < MAX_ZERO_FRACTION
        )


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
        squares, low, high, vanishing, exploding, zeros, nans, infs = columns
        return GradientHealthMetrics(
            tensors=self.tensors,
            norm=sum(squares) ** 0.5,
            min_layer_norm=min(low),
            max_layer_norm=max(high),
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
    """float64 [8]; the tensors share a device and dtype."""
    norms = torch.stack(torch._foreach_norm(grads)).double()
    flat = _flatten_dense_tensors(grads)
    return torch.stack(
        [
            norms.square().sum(),
            norms.min(),
            norms.max(),
            (norms < thresholds.vanishing).sum().double(),
            (norms > thresholds.exploding).sum().double(),
            (flat == 0).sum().double(),
            flat.isnan().sum().double(),
            flat.isinf().sum().double(),
        ]
    )
