"""The table of rewards, and the function that computes them.

To add a reward, add an entry to `MODES` with its config and function. To add a term, add an entry
to the dict that the function of a mode returns, in `Shaping(...)` if it only guides the learner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from esper.leyline import ConfigError
from esper.simic.rewards.components import RewardComponents, Terms
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
from esper.simic.rewards.outcome import budget, loss_reward, objective
from esper.tolaria.engine.transition import Transition


@dataclass(frozen=True)
class RewardMode:
    """The class of a reward's settings, and its terms as a function of (transition of E
    environments, settings, gamma of the run)."""

    config: type[RewardConfig]
    terms: Callable[[Transition, Any, float], Terms]


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

    Raises ConfigError if the config was made for another discount, or if its class is not that of
    its mode. The caller records `suspicions` and may normalise `total`.
    """
    check_gamma(config, gamma)
    mode = MODES.get(config.mode)
    if mode is None or not isinstance(config, mode.config):
        pairs = ", ".join(f"{name} ({mode.config.__name__})" for name, mode in MODES.items())
        raise ConfigError(
            f"{type(config).__name__} has no reward mode {config.mode!r}; there are {pairs}"
        )
    return RewardComponents.of(
        mode.terms(transition, config, gamma),
        transition.acted,
        suspicions(transition, config.hacking_ratio_threshold),
    )
