"""Running statistics to scale observations and rewards."""

from typing import Any

import torch
from torch import Tensor

from esper.leyline import ConfigError
from esper.leyline.constants import NORMALIZER_CLIP


class RunningMeanStd:
    """Mean and population variance of all batches, per column.

    Without `momentum` they are exact (Chan et al., 1979) up to the small prior `epsilon`. With
    `momentum` they are exponential moving averages that start at the first batch, so that large
    inputs do not saturate at first; the variance includes the shift of the mean.
    """

    def __init__(
        self, shape: tuple[int, ...], epsilon: float = 1e-4, momentum: float | None = None
    ) -> None:
        if momentum is not None and not 0.0 < momentum < 1.0:
            raise ConfigError(f"momentum must lie in (0, 1) or be None, got {momentum}")
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.var = torch.ones(shape, dtype=torch.float64)
        self.count = epsilon
        self.epsilon = epsilon
        self.momentum = momentum

    def update(self, batch: Tensor) -> None:
        """Add a batch [n, *shape]; raises ValueError for NaN and infinity."""
        if batch.shape[1:] != self.mean.shape:
            raise ConfigError(
                f"this normaliser takes batches [n, {', '.join(map(str, self.mean.shape))}], "
                f"got {list(batch.shape)}"
            )
        if len(batch) == 0:
            return
        _require_finite(batch)
        n = len(batch)
        mean = batch.double().mean(dim=0)
        var = batch.double().var(dim=0, correction=0)
        delta = mean - self.mean
        if self.momentum is None:
            total = self.count + n
            between = delta.square() * self.count * n / total
            self.var = (self.var * self.count + var * n + between) / total
            self.mean = self.mean + delta * n / total
        elif self.count <= self.epsilon:
            self.mean, self.var = mean, var
        else:
            keep, take = self.momentum, 1.0 - self.momentum
            self.var = keep * self.var + take * var + keep * take * delta.square()
            self.mean = keep * self.mean + take * mean
        self.count += n

    def normalize(self, values: Tensor) -> Tensor:
        """(values - mean) / sqrt(var + 1e-4), clipped, in the type of `values`."""
        scaled = (values.double() - self.mean) / torch.sqrt(self.var + 1e-4)
        return scaled.clamp(-NORMALIZER_CLIP, NORMALIZER_CLIP).to(values.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.clone(), "var": self.var.clone(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["mean"].shape != self.mean.shape:
            raise ConfigError(
                f"saved statistics are for shape {list(state['mean'].shape)}, "
                f"this normaliser is for {list(self.mean.shape)}"
            )
        self.mean = state["mean"].double().clone()
        self.var = state["var"].double().clone()
        self.count = float(state["count"])


class Unscaled(RunningMeanStd):
    """No scaling, for observations that are scaled by construction.

    Statistics per column would treat slots differently by their position.
    """

    def __init__(self) -> None:
        super().__init__((0,))

    def update(self, batch: Tensor) -> None:
        _require_finite(batch)

    def normalize(self, values: Tensor) -> Tensor:
        return values


class RewardNormalizer:
    """Divides rewards by their running standard deviation; the mean stays."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.m2 = 0.0

    def __call__(self, rewards: Tensor) -> Tensor:
        """Update the statistics with the rewards of all environments, then scale them."""
        self.update(rewards)
        return self.normalize_only(rewards)

    def update(self, rewards: Tensor) -> None:
        """Add rewards of any shape; raises ValueError for NaN and infinity."""
        _require_finite(rewards)
        n = rewards.numel()
        if n:
            values = rewards.double()
            mean = values.mean().item()
            delta = mean - self.mean
            total = self.count + n
            self.m2 += ((values - mean).square().sum().item()) + delta**2 * self.count * n / total
            self.mean += delta * n / total
            self.count = total

    def normalize_only(self, rewards: Tensor) -> Tensor:
        """Scale without an update; rewards stay unscaled while all so far were equal."""
        scale = self.std if self.std > 1e-8 else 1.0
        return (rewards / scale).clamp(-NORMALIZER_CLIP, NORMALIZER_CLIP)

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 for fewer than two rewards."""
        return (self.m2 / (self.count - 1)) ** 0.5 if self.count >= 2 else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count = int(state["count"])
        self.mean = float(state["mean"])
        self.m2 = float(state["m2"])


def _require_finite(values: Tensor) -> None:
    if not torch.isfinite(values).all():
        raise ValueError("a normaliser takes finite numbers only, got NaN or infinity")
