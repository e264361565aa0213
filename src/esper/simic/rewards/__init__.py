"""Rewards: pure functions of a transition. `compute_reward` is the only door."""

from esper.leyline import constants
from esper.simic.rewards.components import RewardComponents
from esper.simic.rewards.config import (
    CONTRIBUTION_MODES,
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
    RewardConfig,
    check_gamma,
)
from esper.simic.rewards.contribution import MODES, SHAPED_HINTS
from esper.simic.rewards.hacking import suspicions
from esper.simic.rewards.loss import loss_reward
from esper.simic.rewards.objective import objective
from esper.tolaria import Transition


def compute_reward(transition: Transition, config: RewardConfig, gamma: float) -> RewardComponents:
    """Raw rewards of one step of E environments; `gamma` is the discount of the run.

    Raises ConfigError if the config was made for another discount. The caller records
    `suspicions` and `rows`, and normalises `total` if it wants to.
    """
    check_gamma(config, gamma)
    threshold = constants.HACKING_RATIO_THRESHOLD
    hints = frozenset({"pbrs"})
    if isinstance(config, ObjectiveRewardConfig):
        parts, hints = objective(transition, config), frozenset()
    elif isinstance(config, LossRewardConfig):
        parts = loss_reward(transition, config, gamma)
    else:
        parts = MODES[config.mode](transition, config, gamma)
        threshold = config.hacking_ratio_threshold
        hints = SHAPED_HINTS
    return RewardComponents.of(
        parts,
        transition.acted,
        hints & frozenset(parts),
        suspicions(transition, threshold),
    )


__all__ = [
    "CONTRIBUTION_MODES",
    "ContributionRewardConfig",
    "LossRewardConfig",
    "ObjectiveRewardConfig",
    "RewardComponents",
    "RewardConfig",
    "check_gamma",
    "compute_reward",
]
