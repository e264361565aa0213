"""Metrics of an update.

To add a metric, add an entry to METRICS and a row to docs/ppo.md.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.simic.agent.config import PPOConfig
from esper.simic.telemetry.debug_telemetry import LayerGradientStats, RatioExplosionDiagnostic


@dataclass(frozen=True)
class Minibatch:
    """The valid steps of a minibatch under the current policy, before its optimizer step.

    log_ratio, relevant, entropies   [steps, heads]; 0 for heads that the op ignores
    values, returns, advantages      [steps]
    """

    config: PPOConfig
    log_ratio: Tensor
    relevant: Tensor
    entropies: Tensor
    values: Tensor
    returns: Tensor
    advantages: Tensor

    @cached_property
    def ratio(self) -> Tensor:
        """[steps, heads], 1 for heads that the op ignores."""
        return self.log_ratio.exp()

    @cached_property
    def drawn_ratio(self) -> Tensor:
        """Ratios of the heads that were drawn, [n]."""
        return self.ratio[self.relevant]


# A value that `PPOAgent` reports under this name, or one that is computed from each minibatch.
Source = str | Callable[[Minibatch], Tensor]
# How a metric is reduced from arrays [times reported] or [times reported, heads], one per source.
Rule = tuple[Callable[..., Any], *tuple[Source, ...]]

MUST_BE_FINITE = ("policy_loss", "value_loss", "entropy_bonus", "approx_kl", "grad_norm")


def _entropy(entropies: np.ndarray, counts: np.ndarray) -> float:
    """Mean over all heads and the steps where they were drawn."""
    return (entropies * counts).sum(axis=0).sum() / counts.sum(axis=0).sum()


def _entropy_of(head: int) -> Callable[..., float | None]:
    def reduce(entropies: np.ndarray, counts: np.ndarray) -> float | None:
        drawn = counts.sum(axis=0)[head]
        return (entropies * counts).sum(axis=0)[head] / drawn if drawn else None

    return reduce


def _mean_of(column: int) -> Callable[..., float]:
    return lambda values: values.mean(axis=0)[column]


def _ratio_max(m: Minibatch) -> Tensor:
    return m.ratio.amax(dim=0)


def _ratio_min(m: Minibatch) -> Tensor:
    return m.ratio.amin(dim=0)


def _outliers(m: Minibatch) -> Tensor:
    ratio = m.drawn_ratio
    return ((ratio > m.config.ratio_explosion) | (ratio < m.config.ratio_collapse)).float().mean()


def _worst_head(highest: np.ndarray, lowest: np.ndarray) -> str:
    """The head with the ratio furthest from 1; a ratio of 0 is infinitely far."""
    with np.errstate(divide="ignore"):
        distance = np.maximum(np.log(highest.max(axis=0)), -np.log(lowest.min(axis=0)))
    return HEAD_NAMES[distance.argmax()]


METRICS: dict[str, Rule] = {
    "replay_error": (np.mean, "replay_error"),
    "policy_loss": (np.mean, "policy_loss"),
    "value_loss": (np.mean, "value_loss"),
    "entropy": (_entropy, "head_entropies", "head_counts"),
    "entropy_coef": (np.mean, "entropy_coef"),
    "approx_kl": (np.mean, "approx_kl"),
    "approx_kl_max": (np.max, "approx_kl"),
    "clip_fraction": (
        np.mean,
        lambda m: ((m.drawn_ratio - 1.0).abs() > m.config.clip_ratio).float().mean(),
    ),
    "ratio_mean": (np.mean, lambda m: m.drawn_ratio.mean()),
    "ratio_std": (np.mean, lambda m: m.drawn_ratio.std(correction=0)),
    "ratio_max": (np.max, _ratio_max),
    "ratio_min": (np.min, _ratio_min),
    "ratio_worst_head": (_worst_head, _ratio_max, _ratio_min),
    "ratio_outliers": (np.mean, _outliers),
    "explained_variance": (np.mean, "explained_variance"),
    "advantage_mean": (np.mean, "advantage_mean"),
    "advantage_std": (np.mean, "advantage_std"),
    "advantage_min": (np.mean, "advantage_min"),
    "advantage_max": (np.mean, "advantage_max"),
    "grad_norm": (np.mean, "grad_norm"),
    "grad_norm_max": (np.max, "grad_norm"),
    "gradient_health": (np.mean, "gradient_health"),
    "vanishing_tensors": (np.max, "vanishing_tensors"),
    "exploding_tensors": (np.max, "exploding_tensors"),
    "zero_gradient_fraction": (np.mean, "zero_gradient_fraction"),
    **{
        f"{head}_entropy": (_entropy_of(index), "head_entropies", "head_counts")
        for index, head in enumerate(HEAD_NAMES)
    },
    **{
        f"{head}_grad_norm": (_mean_of(index), "head_grad_norms")
        for index, head in enumerate((*HEAD_NAMES, "value"))
    },
}


@torch.no_grad()
def measure(minibatch: Minibatch) -> dict[Source, Tensor]:
    """Every source in METRICS that is a function, applied to the minibatch."""
    sources = dict.fromkeys(source for _, *own in METRICS.values() for source in own)
    return {source: source(minibatch) for source in sources if callable(source)}


@dataclass
class PPOUpdateMetrics:
    """What one update did; docs/ppo.md explains each metric.

    values  by name as in METRICS; None if there was nothing to measure, for example the entropy
            of a head that was never drawn
    layers  with detailed telemetry: the gradient of every tensor in the last minibatch that had
            one, before clipping
    ratios  with detailed telemetry: the new policy against the stored log-probs over all steps,
            numbered environment by environment
    """

    steps: int
    optimizer_steps: int = 0
    skipped: str | None = None
    early_stop_epoch: int | None = None
    values: dict[str, float | str | None] = field(default_factory=dict)
    layers: list[LayerGradientStats] = field(default_factory=list)
    ratios: RatioExplosionDiagnostic | None = None
    # All that was reported during the update, by source: numbers, or lists of one per head.
    reported: dict[Source, list[Any]] = field(
        default_factory=lambda: defaultdict(list), repr=False, compare=False
    )

    def report(self, values: Mapping[Any, Any]) -> bool:
        """Keep `values`; if a loss or gradient is not finite, set `skipped` and return False."""
        for name in MUST_BE_FINITE:
            if not math.isfinite(values.get(name, 0.0)):
                self.skipped = f"{name} is {values[name]}"
                return False
        for source, value in values.items():
            self.reported[source].append(value)
        return True

    def reduce(self) -> None:
        """Set `values`; None if a source was never reported or the result is not finite."""
        for name, (reduce, *sources) in METRICS.items():
            measured = all(source in self.reported for source in sources)
            value = reduce(*(np.array(self.reported[s]) for s in sources)) if measured else None
            if value is None or isinstance(value, str):
                self.values[name] = value
            else:
                self.values[name] = float(value) if math.isfinite(value) else None

    def flat(self) -> dict[str, Any]:
        """One flat row of numbers, with every name in METRICS."""
        return {
            "steps": self.steps,
            "optimizer_steps": self.optimizer_steps,
            "skipped": self.skipped,
            "early_stop_epoch": self.early_stop_epoch,
            **dict.fromkeys(METRICS),
            **self.values,
        }


def to_host(tensors: Mapping[Any, Tensor]) -> dict[Any, Any]:
    """The same keys with floats and lists of floats, after one transfer from the device."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()]).tolist()
    values: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        first, flat = flat[: tensor.numel()], flat[tensor.numel() :]
        values[name] = first if tensor.dim() else first[0]
    return values
