"""The table of rewards, and the one function that looks into it.

To add a reward, write its config and its function and add an entry to `MODES`. To add a term, add
an entry to the parts that the mode's function gives back; `Hint(...)` around it says that it only
guides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from esper.leyline import ConfigError
from esper.simic.rewards.components import Parts, RewardComponents
from esper.simic.rewards.config import (
    BudgetRewardConfig,
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
    RewardConfig,
    check_gamma,
)
from esper.simic.rewards.contribution import minimal, shaped, simplified, sparse
from esper.simic.rewards.hacking import suspicions
from esper.simic.rewards.loss import loss_reward
from esper.simic.rewards.objective import budget, objective
from esper.tolaria.engine.transition import Transition


@dataclass(frozen=True)
class RewardMode:
    """One reward: the class of its settings, and its parts as a function of (transition of E
    environments, settings, gamma of the run)."""

    config: type[RewardConfig]
    parts: Callable[[Transition, Any, float], Parts]


MODES = {
    "objective": RewardMode(ObjectiveRewardConfig, objective),
    "budget": RewardMode(BudgetRewardConfig, budget),
    "shaped": RewardMode(ContributionRewardConfig, shaped),
    "simplified": RewardMode(ContributionRewardConfig, simplified),
    "sparse": RewardMode(ContributionRewardConfig, sparse),
    "minimal": RewardMode(ContributionRewardConfig, minimal),
    "loss": RewardMode(LossRewardConfig, loss_reward),
}


def compute_reward(transition: Transition, config: RewardConfig, gamma: float) -> RewardComponents:
    """Raw rewards of one step of E environments; `gamma` is the discount of the run.

    Raises ConfigError if the config was made for another discount, or names a mode that its class
    is not for. The caller records `suspicions`, and normalises `total` if it wants to.
    """
    check_gamma(config, gamma)
    return RewardComponents.of(
        _mode_of(config).parts(transition, config, gamma),
        transition.acted,
        suspicions(transition, config.hacking_ratio_threshold),
    )


def _mode_of(config: RewardConfig) -> RewardMode:
    mode = MODES.get(config.mode)
    if mode is None or not isinstance(config, mode.config):
        pairs = ", ".join(f"{name} ({mode.config.__name__})" for name, mode in MODES.items())
        raise ConfigError(
            f"{type(config).__name__} has no reward mode {config.mode!r}; there are {pairs}"
        )
    return mode
