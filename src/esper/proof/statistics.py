"""Paired differences over keys, with confidence intervals and p-values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.leyline import ConfigError

RESAMPLES = 9_999
CONFIDENCE = 0.95


@dataclass(frozen=True)
class PairedDifference:
    """Differences of pairs: their mean, its 95 % interval, and a two-sided p-value.

    The interval is None with one pair, or if all differences are equal.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None


def paired_difference(
    first: Sequence[float], second: Sequence[float], key: int = 0
) -> PairedDifference:
    """first - second, pair by pair: BCa bootstrap interval (Efron, 1987), sign-flip permutation p.

    The p-value is exact for up to 13 pairs, from RESAMPLES random sign flips for more; it is None
    for a single pair. Resampling depends on `key` only. Needs SciPy.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"pairs need two series of one length, got {len(first)} and {len(second)}")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    mean = float(differences.mean())
    if len(differences) < 2:
        return PairedDifference(len(differences), mean, None, None, None)
    low, high = _interval(differences, key)
    return PairedDifference(len(differences), mean, low, high, _sign_flip_p(differences, key))


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """95 % interval of the mean, as for a paired difference; (None, None) if there is none."""
    return (None, None) if len(values) < 2 else _interval(np.asarray(values, np.float64), 0)


def _interval(differences: np.ndarray, key: int) -> tuple[float | None, float | None]:
    stats = require_scipy()
    if np.ptp(differences) <= 1e-12 * max(1.0, float(np.abs(differences).max())):
        return None, None
    result = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="BCa",
        rng=np.random.default_rng(key),
    )
    low, high = map(float, result.confidence_interval)
    return (low, high) if np.isfinite([low, high]).all() else (None, None)


def _sign_flip_p(differences: np.ndarray, key: int) -> float:
    result = require_scipy().permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        alternative="two-sided",
        rng=np.random.default_rng(key),
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values adjusted for their number (Holm, 1979); None stays None and is not counted."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[i] = largest
    return adjusted


def require_scipy() -> Any:
    """`scipy.stats`; raises ConfigError with the cure if SciPy is not installed."""
    try:
        from scipy import stats
    except ModuleNotFoundError:
        raise ConfigError(
            "an evaluation needs SciPy; install it with: pip install 'esper-grow[evaluate]'"
        ) from None
    return stats
