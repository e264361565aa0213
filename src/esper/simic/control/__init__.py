"""Running scales of observations and rewards."""

from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd, Unscaled

__all__ = ["RewardNormalizer", "RunningMeanStd", "Unscaled"]
