"""Terms of rewards, before `shaping_scale`.

Except for the potential they are elementwise functions of arrays of any one shape. `contribution`
of a seed is measured by ablation, `total_improvement` is that of the network since germination;
both are in pp, NaN if not measured.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from esper.growth.slot_table import SlotTable
from esper.leyline import SeedStage
from esper.leyline import constants as k
from esper.leyline.events import RewardHackingSuspected
from esper.simic.rewards.config import ContributionRewardConfig
from esper.tolaria.engine.event_log import Transition


@dataclass(frozen=True)
class Shaping:
    """A term [E] that only guides the learner, unlike terms that pay for the result."""

    value: np.ndarray


# The result of a reward function: terms by name, each float [E].
Terms = dict[str, np.ndarray | Shaping]


@dataclass(frozen=True)
class RewardComponents:
    """Raw rewards of one step of E environments; 0 for an environment that took no step.

    names       names of the k terms
    values      float64 [E, k]
    shaping     names of the shaping terms
    suspicions  seeds newly suspected of reward hacking in this step
    """

    names: tuple[str, ...]
    values: np.ndarray
    shaping: tuple[str, ...] = ()
    suspicions: tuple[RewardHackingSuspected, ...] = ()

    @staticmethod
    def of(
        terms: Terms, acted: np.ndarray, suspicions: tuple[RewardHackingSuspected, ...] = ()
    ) -> "RewardComponents":
        """Stack `terms`; raises ValueError if one is not finite where `acted`."""
        columns = [term.value if isinstance(term, Shaping) else term for term in terms.values()]
        shaping = tuple(name for name, term in terms.items() if isinstance(term, Shaping))
        values = np.where(acted[:, None], np.stack(columns, axis=1), 0.0)
        if not np.isfinite(values).all():
            env, k = np.argwhere(~np.isfinite(values))[0]
            raise ValueError(
                f"reward term {list(terms)[k]!r} of environment {env} is {values[env, k]}: "
                "the environment reported a score or loss that is not finite"
            )
        return RewardComponents(tuple(terms), values, shaping, suspicions)

    @cached_property
    def total(self) -> np.ndarray:
        """float64 [E]"""
        return self.values.sum(axis=1)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[:, self.names.index(name)]

    @property
    def shaped_ratio(self) -> np.ndarray:
        """[E]: |sum of shaping terms| / |total|, 0 where the total is almost 0."""
        shaping = sum((self[name] for name in self.shaping), np.zeros(len(self.values)))
        size = np.abs(self.total)
        known = size >= k.SHAPED_RATIO_MIN_TOTAL
        return np.where(known, np.abs(shaping) / np.where(known, size, 1.0), 0.0)


# The potential of each stage for shaping, indexed by its value; 0 for other stages.
STAGE_POTENTIAL = np.zeros(max(SeedStage) + 1)
STAGE_POTENTIAL[SeedStage.GERMINATED] = 1.0
STAGE_POTENTIAL[SeedStage.TRAINING] = 2.0
STAGE_POTENTIAL[SeedStage.BLENDING] = 3.5
STAGE_POTENTIAL[SeedStage.HOLDING] = 5.5
STAGE_POTENTIAL[SeedStage.FOSSILIZED] = 6.0


def potential(
    table: SlotTable,
    epoch_bonus: float = k.EPOCH_PROGRESS_BONUS,
    max_bonus: float = k.MAX_PROGRESS_BONUS,
) -> np.ndarray:
    """[E]: phi(stage) plus a bounded bonus for the epochs in it, summed over slots with a seed."""
    phi = STAGE_POTENTIAL[table.stage]
    bonus = (phi > 0) * np.minimum(epoch_bonus * table.epochs_in_stage, max_bonus)
    return (phi + bonus).sum(axis=1)


def pbrs(t: Transition, gamma: float, epoch_bonus: float, max_bonus: float) -> np.ndarray:
    """[E]: potential-based reward shaping (Ng, Harada and Russell, 1999), unweighted.

    gamma Phi(s') - Phi(s) leaves the optimal policy unchanged for the gamma of the return. Over an
    episode it telescopes to -Phi(s_0), because Phi is 0 at the end.
    """
    before = potential(t.before.table, epoch_bonus, max_bonus)
    after = potential(t.after.table, epoch_bonus, max_bonus)
    return gamma * np.where(t.ended, 0.0, after) - before


def ratio_penalty(
    contribution: np.ndarray, total_improvement: np.ndarray, config: ContributionRewardConfig
) -> np.ndarray:
    """At most 0: for a contribution out of proportion to an improvement of at least 0."""
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
    """Credit for a seed's contribution; 0 if it was not measured.

    The improvement since germination only lowers the credit, to 0 if the network got worse: a
    seed is never credited with more than its ablation costs. If the score at germination is not
    known, the credit is half of the contribution.
    """
    c, gained, weight = contribution, total_improvement, config.contribution_weight
    share = np.minimum(c, np.sqrt(np.maximum(gained * c, 0.0)))
    raw = np.where(np.isnan(gained), 0.5 * c, share)
    credited = weight * raw + ratio_penalty(c, gained, config)
    return np.where(np.isnan(c), 0.0, np.where(c < 0.0, weight * c, credited))


def blending_warning(
    stage: np.ndarray, total_improvement: np.ndarray, epochs_in_stage: np.ndarray, base: float
) -> np.ndarray:
    """-base (1 + n/2), at most fourfold, for blending although the network got worse."""
    warned = (stage == SeedStage.BLENDING) & (total_improvement < 0.0)
    return np.where(warned, -base * (1.0 + np.minimum(0.5 * epochs_in_stage, 3.0)), 0.0)


def holding_penalty(
    waiting: np.ndarray, epochs_in_stage: np.ndarray, config: ContributionRewardConfig
) -> np.ndarray:
    """For leaving a seed with credit (`waiting`) in HOLDING: 0 in its first epoch, then more with
    each epoch, up to the cap."""
    n = epochs_in_stage
    if config.holding_penalty == "linear":
        size = config.holding_penalty_rate * (n - 1.0)
    else:
        # Beyond 60 epochs the power exceeds any cap, and would overflow in the end.
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
    """A bonus for keeping a seed that helps, in full after some epochs on trial; else penalties."""
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
    """A bounded penalty for removing a seed that helps; 0 if it was not measured.

    There is no bonus for removing another one: it would pay for planting useless seeds.
    """
    penalty = config.cull_good_seed_penalty
    size = np.minimum(penalty + 0.05 * contribution, 3.0 * penalty)
    return np.where(contribution >= 0.0, -size, 0.0)


def sparse_reward(
    best_score: np.ndarray, added_params: np.ndarray, config: ContributionRewardConfig
) -> np.ndarray:
    """scale * clip(best score / 100 - cost of the added parameters, -1, 1)."""
    cost = config.param_penalty_weight * added_params / config.param_budget
    return config.sparse_reward_scale * np.clip(best_score / 100.0 - cost, -1.0, 1.0)
