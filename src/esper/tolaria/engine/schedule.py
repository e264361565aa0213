"""How the learning rate goes over a run."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from esper.leyline import ConfigError


@dataclass(frozen=True)
class RateSchedule:
    """Warm-up, constant, decay. Both are shares of the run: the rate rises linearly from 0 over
    the first `warmup` of it, and falls linearly to 0 over the last `decay` of it."""

    warmup: float = 0.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("warmup", self.warmup), ("decay", self.decay)):
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name} must be a share of the run between 0 and 1, got {share}")
        if self.warmup + self.decay > 1.0:
            raise ConfigError(
                f"warmup {self.warmup} and decay {self.decay} are longer than the run; together "
                "they may be 1 at most"
            )

    def factor(self, progress: ArrayLike) -> np.ndarray:
        """By what the learning rate is multiplied at `progress`, of any shape, from 0 to 1."""
        at = np.clip(np.asarray(progress, dtype=np.float64), 0.0, 1.0)
        rising = at / self.warmup if self.warmup else 1.0
        falling = (1.0 - at) / self.decay if self.decay else 1.0
        return np.minimum(np.minimum(rising, falling), np.ones_like(at))


def batch_factors(rates: np.ndarray, batch: int, batches: int | None) -> np.ndarray:
    """The factors [...] of a batch between `rates` [..., 2], those at the begin and at the end of
    its epoch: at the batch's middle, so that no step is lost to a rate of 0. Where nobody knows how
    many batches there are, it is the middle of the epoch for all of them."""
    share = 0.5 if batches is None else min((batch + 0.5) / batches, 1.0)
    return np.asarray(rates[..., 0] + (rates[..., 1] - rates[..., 0]) * share)
