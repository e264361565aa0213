"""The long look that is taken after an anomaly: every layer, and every place that is not finite."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

DEAD_ZERO_FRACTION = 0.9
EXPLODING_LARGE_FRACTION = 0.1
SMALL, LARGE = 1e-6, 10.0


@dataclass(frozen=True)
class LayerGradientStats:
    """The gradient of one parameter tensor, as it was before clipping if asked before clipping."""

    layer_name: str
    param_count: int
    grad_norm: float
    grad_mean: float
    grad_std: float
    grad_min: float
    grad_max: float
    zero_fraction: float
    small_fraction: float
    large_fraction: float
    nan_count: int
    inf_count: int


@dataclass(frozen=True)
class LayerSummary:
    """health in [0, 1] is lowered by dead layers, exploding layers and NaN."""

    dead_layers: int
    exploding_layers: int
    nan_grad_count: int
    layer_gradient_health: float


@torch.compiler.disable
@torch.no_grad()
def collect_per_layer_gradients(module: nn.Module) -> list[LayerGradientStats]:
    """Statistics of every parameter that has a gradient; one transfer for all of them."""
    named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    if not named:
        return []
    table = torch.stack([_layer(grad.detach().double()) for _, grad in named]).tolist()
    columns = [f.name for f in fields(LayerGradientStats)][2:]
    return [
        LayerGradientStats(name, grad.numel(), **_counted(dict(zip(columns, row, strict=True))))
        for (name, grad), row in zip(named, table, strict=True)
    ]


def _counted(row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: int(row[name]) for name in ("nan_count", "inf_count")}


def _layer(g: Tensor) -> Tensor:
    """In the order of the fields of LayerGradientStats."""
    size = g.abs()
    return torch.stack(
        [
            g.norm(),
            g.mean(),
            g.std(correction=0),
            g.min(),
            g.max(),
            (g == 0).double().mean(),
            (size < SMALL).double().mean(),
            (size > LARGE).double().mean(),
            g.isnan().sum().double(),
            g.isinf().sum().double(),
        ]
    )


def summarize_layers(layers: Iterable[LayerGradientStats]) -> LayerSummary | None:
    """None for no layers."""
    listed = list(layers)
    if not listed:
        return None
    dead = sum(layer.zero_fraction > DEAD_ZERO_FRACTION for layer in listed)
    exploding = sum(layer.large_fraction > EXPLODING_LARGE_FRACTION for layer in listed)
    nans = sum(layer.nan_count for layer in listed)
    n = len(listed)
    health = 1.0 - 0.5 * dead / n - 0.8 * exploding / n - min(nans / 100.0, 0.5)
    return LayerSummary(dead, exploding, nans, max(0.0, health))


@dataclass(frozen=True)
class NumericalStabilityReport:
    """Names of parameters with NaN or infinity in weights or gradients; None is not measured.

    pre_clip_grad_norm   the largest norm that clipping saw, which gradients no longer show
    """

    nan_in_weights: tuple[str, ...]
    inf_in_weights: tuple[str, ...]
    nan_in_gradients: tuple[str, ...]
    inf_in_gradients: tuple[str, ...]
    max_weight: float | None
    max_gradient: float | None
    pre_clip_grad_norm: float | None

    def flat(self) -> dict[str, Any]:
        """Columns of a row of metrics: lists of names as text, None for none."""
        return {
            name: (", ".join(value) or None) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }


@torch.compiler.disable
@torch.no_grad()
def check_numerical_stability(
    module: nn.Module, pre_clip_grad_norm: float | None = None
) -> NumericalStabilityReport:
    """One transfer for the weights and one for the gradients."""
    weights = _scan([(name, p.detach()) for name, p in module.named_parameters()])
    grads = _scan([(n, p.grad) for n, p in module.named_parameters() if p.grad is not None])
    return NumericalStabilityReport(
        nan_in_weights=weights[0],
        inf_in_weights=weights[1],
        nan_in_gradients=grads[0],
        inf_in_gradients=grads[1],
        max_weight=weights[2],
        max_gradient=grads[2],
        pre_clip_grad_norm=pre_clip_grad_norm,
    )


def _scan(
    named: list[tuple[str, Tensor]],
) -> tuple[tuple[str, ...], tuple[str, ...], float | None]:
    """Names with NaN, names with infinity, and the largest absolute entry."""
    if not named:
        return (), (), None
    rows = torch.stack(
        [torch.stack([t.isnan().any(), t.isinf().any(), t.abs().max()]) for _, t in named]
    ).tolist()
    nan = tuple(name for (name, _), row in zip(named, rows, strict=True) if row[0])
    inf = tuple(name for (name, _), row in zip(named, rows, strict=True) if row[1])
    largest = math.nan if nan else max(row[2] for row in rows)
    return nan, inf, largest
