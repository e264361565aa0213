"""What one update did: a table of metrics, each reduced from what its minibatches showed.

To add a metric, give its value in the dictionary that `PPOAgent._losses` or `PPOAgent._step`
returns, and write its line in METRICS and in docs/ppo.md.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.simic.telemetry.debug_telemetry import LayerGradientStats
from esper.simic.telemetry.ratio_diagnostic import RatioExplosionDiagnostic

Value = float | str | None
# What was shown under each name, in the order in which it was: numbers, or lists of one per head.
Collected = defaultdict[str, list[Any]]
# A function of one array per source, [times shown] or [times shown, heads], and the sources.
Rule = tuple[Callable[..., Any], *tuple[str, ...]]

MUST_BE_FINITE = ("policy_loss", "value_loss", "entropy_bonus", "approx_kl", "grad_norm")


def _entropy(entropies: np.ndarray, counts: np.ndarray) -> float:
    """Over all heads and the steps where they mattered."""
    return (entropies * counts).sum(axis=0).sum() / counts.sum(axis=0).sum()


def _entropy_of(head: int) -> Callable[..., float | None]:
    def reduce(entropies: np.ndarray, counts: np.ndarray) -> float | None:
        mattered = counts.sum(axis=0)[head]
        return (entropies * counts).sum(axis=0)[head] / mattered if mattered else None

    return reduce


def _mean_of(column: int) -> Callable[..., float]:
    return lambda values: values.mean(axis=0)[column]


def _worst_head(highest: np.ndarray, lowest: np.ndarray) -> str:
    """The head with the ratio furthest from 1; one that underflowed to 0 is infinitely far."""
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
    "clip_fraction": (np.mean, "clip_fraction"),
    "ratio_mean": (np.mean, "ratio_mean"),
    "ratio_std": (np.mean, "ratio_std"),
    "ratio_max": (np.max, "ratio_max"),
    "ratio_min": (np.min, "ratio_min"),
    "ratio_worst_head": (_worst_head, "ratio_max", "ratio_min"),
    "ratio_outliers": (np.mean, "ratio_outliers"),
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


@dataclass
class PPOUpdateMetrics:
    """What one update did; docs/ppo.md says what a bad value looks like.

    values  by name as in METRICS; `None` where there was nothing to measure, for example the
            entropy of a head that no chosen op made relevant
    layers  if looked at closely: the gradient of every tensor in the last minibatch that had one,
            before clipping
    ratios  if looked at closely: the new policy against the stored log-probs over all steps, which
            are numbered environment by environment
    """

    steps: int
    optimizer_steps: int = 0
    skipped: str | None = None
    early_stop_epoch: int | None = None
    values: dict[str, Value] = field(default_factory=dict)
    layers: list[LayerGradientStats] = field(default_factory=list)
    ratios: RatioExplosionDiagnostic | None = None

    def flat(self) -> dict[str, Any]:
        """One flat row of numbers, with every name of METRICS."""
        return {
            "steps": self.steps,
            "optimizer_steps": self.optimizer_steps,
            "skipped": self.skipped,
            "early_stop_epoch": self.early_stop_epoch,
            **dict.fromkeys(METRICS),
            **self.values,
        }


def new_collection() -> Collected:
    return defaultdict(list)


def collect(collected: Collected, shown: Mapping[str, Any]) -> None:
    for name, value in shown.items():
        collected[name].append(value)


def reduce_all(collected: Collected) -> dict[str, Value]:
    """The value of every metric; None if its sources were never shown or it is not finite."""
    values: dict[str, Value] = {}
    for name, (reduce, *sources) in METRICS.items():
        measured = all(source in collected for source in sources)
        value = reduce(*(np.array(collected[s]) for s in sources)) if measured else None
        if value is None or isinstance(value, str):
            values[name] = value
        else:
            values[name] = float(value) if math.isfinite(value) else None
    return values


def non_finite(shown: Mapping[str, Any]) -> str | None:
    """A sentence naming the first term of a step that is NaN or infinite, or None."""
    for name in MUST_BE_FINITE:
        if name in shown and not math.isfinite(shown[name]):
            return f"{name} is {shown[name]}"
    return None


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same names with floats and lists of floats, after one transfer from the device."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()]).tolist()
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        first, flat = flat[: tensor.numel()], flat[tensor.numel() :]
        values[name] = first if tensor.dim() else first[0]
    return values
