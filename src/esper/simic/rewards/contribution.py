"""The contribution family: rewards that use the contribution of each seed.

`shaped` lends credit for a contribution as soon as it is measured and takes it back when the seed
is culled or the episode ends. Ablation overrates seeds that the host has adapted to, so in the end
only the score of the network counts.
"""

import numpy as np

from esper.leyline import HOLDS_SEED, IS_LIVE, OP, SLOT, LifecycleOp, SeedStage
from esper.simic.rewards import terms
from esper.simic.rewards.config import ContributionRewardConfig
from esper.simic.rewards.terms import Shaping, Terms
from esper.tolaria.engine.event_log import Transition


def shaped(t: Transition, config: ContributionRewardConfig, gamma: float) -> Terms:
    before, after, scale = t.before.table, t.after.table, config.shaping_scale
    had, has = (
        terms.credit(table.contribution, table.total_improvement, config)
        for table in (before, after)
    )
    held_on = (before.stage == SeedStage.HOLDING) & (after.stage == SeedStage.HOLDING)
    n, gained = after.epochs_in_stage, after.total_improvement
    lent = np.where(t.ended, 0.0, has.sum(axis=1)) - had.sum(axis=1)
    warning = terms.blending_warning(after.stage, gained, n, config.blending_warning)
    holding = terms.holding_penalty(held_on & (has > 0.0), n, config)
    added = t.after.total_params - t.after.host_params
    rent = terms.rent(added, t.after.host_params, config.rent_weight, config.max_rent)
    shaping = terms.pbrs(t, gamma, config.epoch_progress_bonus, config.max_progress_bonus)
    removed = config.auto_cull_penalty * auto_culled(t).sum(axis=1)
    fossils = config.fossil_terminal_bonus * contributing_fossils(t, config)
    score = np.where(t.truncated, t.after.signals.val_score, 0.0)
    return {
        "attribution": Shaping(scale * lent),
        "blending_warning": Shaping(scale * warning.sum(axis=1)),
        "holding_penalty": Shaping(scale * holding.sum(axis=1)),
        "pbrs": Shaping(scale * (config.pbrs_weight * shaping)),
        "rent": scale * rent,
        "intervention": Shaping(scale * intervention(t, config)),
        "action_shaping": Shaping(scale * action_shaping(t, config)),
        "auto_cull": Shaping(scale * -removed),
        "terminal_fossils": scale * fossils,
        "terminal_score": config.terminal_score_weight * score,
        "rollback": -config.rollback_penalty * t.rolled_back,
    }


def simplified(t: Transition, config: ContributionRewardConfig, gamma: float) -> Terms:
    shaping = terms.pbrs(t, gamma, config.epoch_progress_bonus, config.max_progress_bonus)
    score = np.where(t.truncated, t.after.signals.val_score, 0.0)
    acts = t.actions[:, OP] != LifecycleOp.WAIT
    return {
        "pbrs": Shaping(config.pbrs_weight * shaping),
        "intervention": Shaping(-config.simplified_intervention_cost * acts),
        "terminal_score": config.simplified_score_weight * score / 100.0,
        "terminal_fossils": config.simplified_fossil_bonus * contributing_fossils(t, config),
        "rollback": -config.rollback_penalty * t.rolled_back,
    }


def sparse(t: Transition, config: ContributionRewardConfig, gamma: float) -> Terms:
    """Only the end of an episode pays; a rollback pays the least possible reward."""
    added = t.after.total_params - t.after.host_params
    score = np.where(t.truncated, t.after.signals.best_val_score, 0.0)
    return {
        "terminal_score": np.where(t.truncated, terms.sparse_reward(score, added, config), 0.0),
        "rollback": -config.sparse_reward_scale * t.rolled_back,
    }


def minimal(t: Transition, config: ContributionRewardConfig, gamma: float) -> Terms:
    young = t.before.table.epochs_total < config.early_cull_epochs
    early = (acts_on(t, LifecycleOp.CULL) & young).sum(axis=1)
    return {**sparse(t, config, gamma), "early_cull": -config.early_cull_penalty * early}


def acts_on(t: Transition, op: LifecycleOp) -> np.ndarray:
    """bool[E, S]: the slots that `op` was applied to."""
    slots = np.arange(t.before.table.shape[1])
    return (t.actions[:, OP] == op)[:, None] & (t.actions[:, SLOT, None] == slots)


def auto_culled(t: Transition) -> np.ndarray:
    """bool[E, S]: seeds that the lifecycle removed, not the policy."""
    germinated = acts_on(t, LifecycleOp.GERMINATE)
    lived = IS_LIVE[t.before.table.stage] | germinated
    gone = ~HOLDS_SEED[t.after.table.stage] & ~acts_on(t, LifecycleOp.CULL)
    return lived & gone & ~t.rolled_back[:, None]


def intervention(t: Transition, config: ContributionRewardConfig) -> np.ndarray:
    """[E]: the cost of the chosen ops."""
    costs = np.zeros(len(LifecycleOp))
    costs[LifecycleOp.GERMINATE] = config.germinate_cost
    costs[LifecycleOp.CULL] = config.cull_cost
    costs[LifecycleOp.FOSSILIZE] = config.fossilize_cost
    return -costs[t.actions[:, OP]]


def action_shaping(t: Transition, config: ContributionRewardConfig) -> np.ndarray:
    """[E]: for keeping or removing the seed that the op was applied to."""
    table = t.before.table
    c, gained, n = table.contribution, table.total_improvement, table.epochs_in_stage
    culled = np.where(acts_on(t, LifecycleOp.CULL), terms.cull_shaping(c, config), 0.0)
    kept = terms.fossilize_shaping(c, gained, n, config)
    return np.where(acts_on(t, LifecycleOp.FOSSILIZE), kept, culled).sum(axis=1)


def contributing_fossils(t: Transition, config: ContributionRewardConfig) -> np.ndarray:
    """[E]: number of kept seeds that contribute when the episode reaches its length; 0 before."""
    table = t.after.table
    helps = table.contribution >= config.contributing_threshold
    fossils = (table.stage == SeedStage.FOSSILIZED) & helps & t.truncated[:, None]
    return fossils.sum(axis=1)
