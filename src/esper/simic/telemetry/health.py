"""Health of gradients and its drift, and of the hidden state of a recurrent policy.

Each is measured with few operations and one transfer from the device.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from esper.growth.devices import wide_dtype
from esper.leyline import ConfigError
from esper.leyline import constants as c

MOMENTUM, EPSILON = 0.99, 1e-8  # of the moving averages


@dataclass(frozen=True)
class GradientThresholds:
    """Norms of single parameter tensors, before clipping, that count as vanishing or exploding."""

    vanishing: float
    exploding: float

    @staticmethod
    def for_clip_norm(max_grad_norm: float) -> "GradientThresholds":
        """Thresholds relative to the largest norm of a step."""
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
    not_finite      number of elements that are NaN or infinite
    health          1 is good: 1 - 0.5 share vanishing - 0.8 share exploding, 0 with NaN or infinity
    """

    tensors: int
    norm: float
    vanishing: int
    exploding: int
    zero_fraction: float
    not_finite: int

    @staticmethod
    def from_row(row: list[float]) -> "GradientHealthMetrics":
        """The result of `measure_gradients`, fetched from the device."""
        tensors, elements, squares, vanishing, exploding, nonzero, not_finite = row
        return GradientHealthMetrics(
            tensors=int(tensors),
            norm=squares**0.5,
            vanishing=int(vanishing),
            exploding=int(exploding),
            zero_fraction=(elements - nonzero) / elements,
            not_finite=int(not_finite),
        )

    @property
    def is_finite(self) -> bool:
        return self.not_finite == 0

    @property
    def health(self) -> float:
        if not self.is_finite:
            return 0.0
        loss = 0.5 * self.vanishing / self.tensors + 0.8 * self.exploding / self.tensors
        return max(0.0, 1.0 - loss)


@torch.compiler.disable
@torch.no_grad()
def measure_gradients(params: Iterable[nn.Parameter], thresholds: GradientThresholds) -> Tensor:
    """[7], as exact as the device can, for `GradientHealthMetrics.from_row`; nothing is fetched
    from the device.

    Devices and dtypes may differ, but at least one parameter must have a gradient.
    """
    grads: list[Tensor | None] = [p.grad for p in params if p.grad is not None]
    groups = _group_tensors_by_device_and_dtype([grads]).values()
    rows = [_measure(cast(list[Tensor], group[0]), thresholds) for group, _ in groups]
    return torch.stack([row.to(rows[0].device) for row in rows]).sum(dim=0)


def _measure(grads: list[Tensor], thresholds: GradientThresholds) -> Tensor:
    """The row of gradients that share a device and dtype."""
    norms = torch.stack(torch._foreach_norm(grads))
    norms = norms.to(wide_dtype(norms.device.type))
    flat = _flatten_dense_tensors(grads)
    # Counting is three times as fast as adding up booleans; x - x is 0 for every finite x.
    counts = [
        (norms < thresholds.vanishing).count_nonzero(),
        (norms > thresholds.exploding).count_nonzero(),
        flat.count_nonzero(),
        (flat - flat).count_nonzero(),
    ]
    sizes = norms.new_tensor([len(grads), flat.numel()])
    return torch.cat([sizes, norms.square().sum().view(1), torch.stack(counts).to(norms.dtype)])


class GradientEMATracker:
    """Exponential moving averages of gradient norm and health; skips None, NaN and infinity."""

    def __init__(self) -> None:
        self.norm: float | None = None
        self.health: float | None = None

    def update(self, norm: float | None, health: float | None) -> dict[str, float | None]:
        """`norm_drift` and `health_drift`, |x - mean| / mean with the means so far, None without a
        mean or a finite x; then the values join the means."""
        norm_drift, self.norm = _drift(norm, self.norm)
        health_drift, self.health = _drift(health, self.health)
        return {"norm_drift": norm_drift, "health_drift": health_drift}

    def state_dict(self) -> dict[str, float | None]:
        return {"norm": self.norm, "health": self.health}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.norm, self.health = state["norm"], state["health"]


def _drift(value: float | None, mean: float | None) -> tuple[float | None, float | None]:
    """The drift and the new mean."""
    if value is None or not math.isfinite(value):
        return None, mean
    if mean is None:
        return None, value
    return abs(value - mean) / (mean + EPSILON), MOMENTUM * mean + (1.0 - MOMENTUM) * value


# --- hidden states -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LSTMHealth:
    """Largest L2 norm of an environment, and largest absolute entry, of hidden and cell state."""

    h_norm: float
    c_norm: float
    h_max: float
    c_max: float
    unhealthy_envs: tuple[int, ...]

    def flat(self) -> dict[str, float]:
        """Columns of a row of metrics."""
        sizes = ("h_norm", "c_norm", "h_max", "c_max")
        row = {f"lstm_{name}": getattr(self, name) for name in sizes}
        return row | {"lstm_unhealthy_envs": len(self.unhealthy_envs)}


@torch.compiler.disable
@torch.no_grad()
def compute_lstm_health(hidden: tuple[Tensor, Tensor] | None) -> LSTMHealth | None:
    """For h and c of shape [layers, E, H]; None for None. One transfer from the device.

    An environment is healthy if both norms lie between LSTM_MIN_NORM and LSTM_MAX_NORM.
    """
    if hidden is None:
        return None
    both = torch.stack([state.detach().float() for state in hidden])
    if both.dim() != 4:
        raise ValueError(f"hidden states must be [layers, envs, size], got {list(both.shape[1:])}")
    norms = both.square().sum(dim=(1, 3)).sqrt()
    summary = torch.cat([norms.amax(dim=1), both.abs().amax(dim=(1, 2, 3)), norms.flatten()])
    h_norm, c_norm, h_max, c_max, *per_env = summary.tolist()
    pairs = zip(per_env[: norms.shape[1]], per_env[norms.shape[1] :], strict=True)
    return LSTMHealth(
        h_norm=h_norm,
        c_norm=c_norm,
        h_max=h_max,
        c_max=c_max,
        # Comparisons with NaN are False, so a NaN is unhealthy.
        unhealthy_envs=tuple(
            env
            for env, pair in enumerate(pairs)
            if not all(c.LSTM_MIN_NORM < norm < c.LSTM_MAX_NORM for norm in pair)
        ),
    )
