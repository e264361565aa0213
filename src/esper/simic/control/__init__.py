"""Running scales of observations and rewards."""

from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd

__all__ = ["RewardNormalizer", "RunningMeanStd"]
