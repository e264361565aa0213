"""The terms of the contribution family: elementwise functions of arrays of any one shape.

c is a seed's contribution by ablation, T the network's improvement since the seed's germination,
both in pp and NaN when not measured. Results are before `shaping_scale`.
"""

import numpy as np

from esper.leyline import SeedStage
from esper.leyline import constants as k
from esper.simic.rewards.config import ContributionRewardConfig


def ratio_penalty(
    contribution: np.ndarray, total_improvement: np.ndarray, config: ContributionRewardConfig
) -> np.ndarray:
    """At most 0: for contribution out of proportion to an improvement of at least 0."""
    c, gained = contribution, total_improvement
    limit, most = config.hacking_ratio_threshold, config.max_ratio_penalty
    applies = (c > k.HACKING_MIN_CONTRIBUTION) & (gained >= 0.0)
    if not applies.any():
        return np.zeros(c.shape)
    safe = gained > max(config.improvement_safe_threshold, k.MIN_IMPROVEMENT)
    ratio = c / np.where(safe, gained, 1.0)
    excess = (ratio - limit) / max(limit, k.MIN_IMPROVEMENT)
    by_ratio = np.minimum(np.maximum(most / 3.0 * excess, 0.0), most)
    by_size = most * np.minimum(1.0, c / 10.0)
    return -np.where(applies, np.where(safe, by_ratio, by_size), 0.0)


def credit(
    contribution: np.ndarray, total_improvement: np.ndarray, config: ContributionRewardConfig
) -> np.ndarray:
    """What a seed's contribution is worth; what is not measured is worth nothing.

    What the network gained since germination only ever lowers the credit, to nothing where it got
    worse: a seed is never credited with more than taking it out costs. Half, where the score at
    germination is not known.
    """
    c, gained, weight = contribution, total_improvement, config.contribution_weight
    share = np.minimum(c, np.sqrt(np.maximum(gained * c, 0.0)))
    raw = np.where(np.isnan(gained), 0.5 * c, share)
    worth = weight * raw + ratio_penalty(c, gained, config)
    return np.where(np.isnan(c), 0.0, np.where(c < 0.0, weight * c, worth))


def blending_warning(
    stage: np.ndarray, total_improvement: np.ndarray, epochs_in_stage: np.ndarray, base: float
) -> np.ndarray:
    """-base (1 + n/2), from the fourfold on constant: blending although the network got worse."""
    warned = (stage == SeedStage.BLENDING) & (total_improvement < 0.0)
    return np.where(warned, -base * (1.0 + np.minimum(0.5 * epochs_in_stage, 3.0)), 0.0)


def holding_penalty(
    waiting: np.ndarray, epochs_in_stage: np.ndarray, config: ContributionRewardConfig
) -> np.ndarray:
    """For leaving a creditable seed (`waiting`) in HOLDING: nothing in its first epoch, then more
    with each one, up to the cap."""
    n = epochs_in_stage
    if config.holding_penalty == "linear":
        size = config.holding_penalty_rate * (n - 1.0)
    else:
        # Beyond 60 epochs the power only grows past any cap, and at last past what a float holds.
        size = config.holding_penalty_base ** np.minimum(n - 2.0, 60.0)
    return np.where(waiting & (n >= 2), -np.minimum(size, config.holding_penalty_cap), 0.0)


def rent(added_params: np.ndarray, host_params: int, weight: float, most: float) -> np.ndarray:
    """-weight ln(1 + added / host), at least -most."""
    return -np.minimum(weight * np.log1p(added_params / host_params), most)


def fossilize_shaping(
    contribution: np.ndarray,
    total_improvement: np.ndarray,
    epochs_in_stage: np.ndarray,
    config: ContributionRewardConfig,
) -> np.ndarray:
    """A bonus for keeping what helps, full after some epochs of watching it; else penalties."""
    c, gained = contribution, total_improvement
    degraded = (
        -config.fossilize_degraded_penalty
        - np.minimum(0.2 * np.abs(gained), 1.0)
        - 0.3 * ((c > k.RANSOMWARE_CONTRIBUTION) & (gained < k.RANSOMWARE_DEGRADATION))
    )
    legitimacy = np.minimum(1.0, epochs_in_stage / k.FOSSILIZE_LEGITIMATE_EPOCHS)
    bonus = (config.fossilize_base_bonus + config.fossilize_contribution_scale * c) * legitimacy
    kept = np.where(
        c >= config.contributing_threshold, bonus, -config.fossilize_noncontributing_penalty
    )
    return np.where(gained < 0.0, degraded, kept)


def cull_shaping(contribution: np.ndarray, config: ContributionRewardConfig) -> np.ndarray:
    """A bounded penalty for giving up what helps; nothing for what was not measured."""
    c, base = contribution, config.cull_good_seed_penalty
    good = -np.minimum(base + 0.05 * c, 3.0 * base)
    bad = np.where(
        c < config.cull_hurting_threshold, config.cull_hurting_bonus, config.cull_acceptable_bonus
    )
    return np.where(np.isnan(c), 0.0, np.where(c >= 0.0, good, bad))


def sparse_reward(
    best_score: np.ndarray, added_params: np.ndarray, config: ContributionRewardConfig
) -> np.ndarray:
    """scale * clip(best score / 100 - cost of the added parameters, -1, 1)."""
    cost = config.param_penalty_weight * added_params / config.param_budget
    return config.sparse_reward_scale * np.clip(best_score / 100.0 - cost, -1.0, 1.0)
