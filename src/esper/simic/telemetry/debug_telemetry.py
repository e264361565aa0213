"""Detailed telemetry after an anomaly: ratios, gradients of every layer, non-finite parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.devices import wide_dtype
from esper.leyline import HEAD_NAMES
from esper.leyline import constants as c

DEAD_ZERO_FRACTION = 0.9
EXPLODING_LARGE_FRACTION = 0.1
SMALL, LARGE = 1e-6, 10.0


@dataclass(frozen=True)
class LayerGradientStats:
    """The gradient of one parameter tensor."""

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


@torch.compiler.disable
@torch.no_grad()
def collect_per_layer_gradients(module: nn.Module) -> list[LayerGradientStats]:
    """Statistics of every parameter that has a gradient; one transfer for all of them."""
    named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    if not named:
        return []
    exact = wide_dtype(named[0][1].device.type)
    table = torch.stack([_layer(grad.detach().to(exact)) for _, grad in named]).tolist()
    return [
        LayerGradientStats(name, grad.numel(), *row[:-2], *map(int, row[-2:]))
        for (name, grad), row in zip(named, table, strict=True)
    ]


def _layer(g: Tensor) -> Tensor:
    """The fields of LayerGradientStats from `grad_norm` on."""
    size = g.abs()
    return torch.stack(
        [
            g.norm(),
            g.mean(),
            g.std(correction=0),
            g.min(),
            g.max(),
            (g == 0).to(g.dtype).mean(),
            (size < SMALL).to(g.dtype).mean(),
            (size > LARGE).to(g.dtype).mean(),
            g.isnan().sum().to(g.dtype),
            g.isinf().sum().to(g.dtype),
        ]
    )


def summarize_layers(layers: Sequence[LayerGradientStats]) -> dict[str, float]:
    """Columns of a row of metrics, none without layers.

    The health in [0, 1] is lowered by dead layers, exploding layers and NaN.
    """
    if not layers:
        return {}
    dead = sum(layer.zero_fraction > DEAD_ZERO_FRACTION for layer in layers)
    exploding = sum(layer.large_fraction > EXPLODING_LARGE_FRACTION for layer in layers)
    nans = sum(layer.nan_count for layer in layers)
    n = len(layers)
    health = 1.0 - 0.5 * dead / n - 0.8 * exploding / n - min(nans / 100.0, 0.5)
    return {
        "dead_layers": dead,
        "exploding_layers": exploding,
        "nan_grad_count": nans,
        "layer_gradient_health": max(0.0, health),
    }


@dataclass(frozen=True)
class NumericalStabilityReport:
    """Names of parameters with NaN or infinity in weights or gradients.

    max_gradient         None without gradients
    pre_clip_grad_norm   the largest norm before clipping, if known
    """

    nan_in_weights: tuple[str, ...]
    inf_in_weights: tuple[str, ...]
    nan_in_gradients: tuple[str, ...]
    inf_in_gradients: tuple[str, ...]
    max_weight: float | None
    max_gradient: float | None
    pre_clip_grad_norm: float | None

    def flat(self) -> dict[str, Any]:
        """Columns of a row of metrics: names as text, None for no names."""
        return {
            name: (", ".join(value) or None) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }


@torch.compiler.disable
@torch.no_grad()
def check_numerical_stability(
    module: nn.Module, pre_clip_grad_norm: float | None = None
) -> NumericalStabilityReport:
    """Scan weights and gradients, with one transfer each."""
    named = list(module.named_parameters())
    weights = _scan([(name, p.detach()) for name, p in named])
    grads = _scan([(name, p.grad) for name, p in named if p.grad is not None])
    return NumericalStabilityReport(
        *weights[:2], *grads[:2], weights[2], grads[2], pre_clip_grad_norm
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


MOST_EXAMPLES = 32


@dataclass(frozen=True)
class RatioExplosionDiagnostic:
    """Ratios outside the limits, over the heads that were relevant in each step.

    worst_head      the head with the ratio furthest from 1 (in log), None without any step
    worst_ratio     that ratio
    outliers        number per head, in the order of HEAD_NAMES
    examples        rows of metrics for the worst outliers, at most MOST_EXAMPLES, worst first
    log_prob_change_mean, log_prob_change_max   of |new - old| over relevant heads
    """

    worst_head: str | None
    worst_ratio: float | None
    outliers: dict[str, int]
    examples: list[dict[str, Any]]
    log_prob_change_mean: float | None
    log_prob_change_max: float | None

    @staticmethod
    @torch.compiler.disable
    @torch.no_grad()
    def from_batch(
        old_log_probs: Tensor,
        new_log_probs: Tensor,
        relevant: Tensor,
        actions: Tensor,
        max_ratio: float = c.RATIO_EXPLOSION_THRESHOLD,
        min_ratio: float = c.RATIO_COLLAPSE_THRESHOLD,
    ) -> "RatioExplosionDiagnostic":
        """All [N, heads]; `relevant` says which heads the op of each step uses."""
        if not old_log_probs.shape == new_log_probs.shape == relevant.shape == actions.shape:
            raise ValueError(
                f"old {list(old_log_probs.shape)}, new {list(new_log_probs.shape)}, relevant "
                f"{list(relevant.shape)} and actions {list(actions.shape)} must have one shape"
            )
        exact = wide_dtype(new_log_probs.device.type)
        change = (new_log_probs - old_log_probs).to(exact)
        packed = torch.stack([change, relevant.to(exact), actions.to(exact)]).cpu().double()
        change, used, chosen = packed[0], packed[1].bool(), packed[2].long()
        if not used.any():
            none = dict.fromkeys(HEAD_NAMES, 0)
            return RatioExplosionDiagnostic(None, None, none, [], None, None)
        ratio = change.exp()
        # Not 'ratio > max or < min': a NaN is an outlier too.
        outside = used & ~((ratio <= max_ratio) & (ratio >= min_ratio))
        distance = torch.where(used, change.abs().nan_to_num(nan=torch.inf), -1.0)
        step, head = divmod(int(distance.argmax()), len(HEAD_NAMES))
        order = distance[outside].argsort(descending=True, stable=True)[:MOST_EXAMPLES]
        examples = zip(
            outside.nonzero()[order].tolist(),
            ratio[outside][order].tolist(),
            chosen[outside][order].tolist(),
            strict=True,
        )
        size = change[used].abs()
        return RatioExplosionDiagnostic(
            worst_head=HEAD_NAMES[head],
            worst_ratio=float(ratio[step, head]),
            outliers=dict(zip(HEAD_NAMES, outside.sum(dim=0).tolist(), strict=True)),
            examples=[
                {"index": index, "head": HEAD_NAMES[h], "ratio": value, "action": action}
                for (index, h), value, action in examples
            ],
            log_prob_change_mean=float(size.mean()),
            log_prob_change_max=float(size.max()),
        )

    def flat(self) -> dict[str, Any]:
        """Columns of one row of metrics, without the examples."""
        return {
            "worst_head": self.worst_head,
            "worst_ratio": self.worst_ratio,
            **{f"{head}_outliers": count for head, count in self.outliers.items()},
            "log_prob_change_mean": self.log_prob_change_mean,
            "log_prob_change_max": self.log_prob_change_max,
        }
