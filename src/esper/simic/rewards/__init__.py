"""Rewards: pure functions of a transition. `compute_reward` is the only door."""

from esper.simic.rewards.components import Hint, Parts, RewardComponents
from esper.simic.rewards.config import (
    BudgetRewardConfig,
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
    RewardConfig,
    check_gamma,
)
from esper.simic.rewards.modes import MODES, RewardMode, compute_reward

__all__ = [
    "MODES",
    "BudgetRewardConfig",
    "ContributionRewardConfig",
    "Hint",
    "LossRewardConfig",
    "ObjectiveRewardConfig",
    "Parts",
    "RewardComponents",
    "RewardConfig",
    "RewardMode",
    "check_gamma",
    "compute_reward",
]
