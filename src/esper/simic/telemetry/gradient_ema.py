"""Drift of gradients: how far an update is from the running mean of those before it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


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
