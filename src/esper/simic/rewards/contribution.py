"""The contribution family: rewards that look at what each seed contributes.

`shaped` lends credit for contribution as soon as it is measured and takes it back when the episode
ends: removal damage is inflated by anything that grew together, so in the end only the network's
score counts. Culling a seed ends its loan, which is the reference's 'sign flip'.
"""

from collections.abc import Callable

import numpy as np

from esper.growth import SlotTable
from esper.leyline import HOLDS_SEED, IS_LIVE, OP, SLOT, LifecycleOp, SeedStage
from esper.simic.rewards import terms
from esper.simic.rewards.config import ContributionRewardConfig
from esper.simic.rewards.potential import table_pbrs
from esper.tolaria import Transition

Parts = dict[str, np.ndarray]
SHAPED_HINTS = frozenset(
    {
        "attribution",
        "blending_warning",
        "holding_penalty",
        "pbrs",
        "intervention",
        "action_shaping",
        "auto_cull",
    }
)


def table_credits(
    before: SlotTable, after: SlotTable, config: ContributionRewardConfig
) -> np.ndarray:
    """[2, E, S]: credit of every seed that acts on the output and was measured, then and now."""
    contribution = np.stack([before.contribution, after.contribution])
    gained = np.stack([before.total_improvement, after.total_improvement])
    return terms.credit(contribution, gained, gained, config)


def shaped(t: Transition, config: ContributionRewardConfig, gamma: float) -> Parts:
    before, after = t.before.table, t.after.table
    had, has = table_credits(before, after, config)
    held_on = (before.stage == SeedStage.HOLDING) & (after.stage == SeedStage.HOLDING)
    n, gained = after.epochs_in_stage, after.total_improvement
    warning = terms.blending_warning(after.stage, gained, n, config.blending_warning)
    holding = terms.holding_penalty(held_on & (has > 0.0), n, config)
    added = t.after.total_params - t.after.host_params
    shaping = table_pbrs(t, gamma, config.epoch_progress_bonus, config.max_progress_bonus)
    hints = {
        "attribution": np.where(t.ended, 0.0, has.sum(axis=1)) - had.sum(axis=1),
        "blending_warning": warning.sum(axis=1),
        "holding_penalty": holding.sum(axis=1),
        "pbrs": config.pbrs_weight * shaping,
        "rent": terms.rent(added, t.after.host_params, config.rent_weight, config.max_rent),
        "intervention": intervention(t, config),
        "action_shaping": action_shaping(t, config),
        "auto_cull": -config.auto_cull_penalty * auto_culled(t).sum(axis=1),
        "terminal_fossils": config.fossil_terminal_bonus * at_end(t, contributing_fossils, config),
    }
    parts = {name: config.shaping_scale * part for name, part in hints.items()}
    score = np.where(t.truncated, t.after.signals.val_score, 0.0)
    parts["terminal_score"] = config.terminal_score_weight * score
    parts["rollback"] = -config.rollback_penalty * t.rolled_back
    return parts


def simplified(t: Transition, config: ContributionRewardConfig, gamma: float) -> Parts:
    shaping = table_pbrs(t, gamma, config.epoch_progress_bonus, config.max_progress_bonus)
    score = np.where(t.truncated, t.after.signals.val_score, 0.0)
    acts = t.actions[:, OP] != LifecycleOp.WAIT
    return {
        "pbrs": config.pbrs_weight * shaping,
        "intervention": -config.simplified_intervention_cost * acts,
        "terminal_score": config.simplified_score_weight * score / 100.0,
        "terminal_fossils": config.simplified_fossil_bonus
        * at_end(t, contributing_fossils, config),
        "rollback": -config.rollback_penalty * t.rolled_back,
    }


def sparse(t: Transition, config: ContributionRewardConfig, gamma: float) -> Parts:
    """Only the end pays. A rollback is the worst end there is: minus the scale."""
    added = t.after.total_params - t.after.host_params
    score = np.where(t.truncated, t.after.signals.best_val_score, 0.0)
    return {
        "terminal_score": np.where(t.truncated, terms.sparse_reward(score, added, config), 0.0),
        "rollback": -config.sparse_reward_scale * t.rolled_back,
    }


def minimal(t: Transition, config: ContributionRewardConfig, gamma: float) -> Parts:
    table = t.before.table
    young = table.epochs_total < config.early_cull_epochs
    early = (acts_on(t, LifecycleOp.CULL) & young).any(axis=1)
    penalty = np.where(early, -config.early_cull_penalty, 0.0)
    return {**sparse(t, config, gamma), "early_cull": penalty}


# --- parts of a transition -------------------------------------------------------------------


def acts_on(t: Transition, op: LifecycleOp) -> np.ndarray:
    """bool[E, S]: the slot that an op was applied to, in the environments that chose it."""
    slots = np.arange(t.before.table.shape[1])
    return (t.actions[:, OP] == op)[:, None] & (t.actions[:, SLOT, None] == slots)


def auto_culled(t: Transition) -> np.ndarray:
    """bool[E, S]: seeds that the lifecycle removed because nobody else did."""
    germinated = acts_on(t, LifecycleOp.GERMINATE)
    lived = IS_LIVE[t.before.table.stage] | germinated
    gone = ~HOLDS_SEED[t.after.table.stage] & ~acts_on(t, LifecycleOp.CULL)
    return lived & gone & ~t.rolled_back[:, None]


def intervention(t: Transition, config: ContributionRewardConfig) -> np.ndarray:
    """[E]: the cost of the chosen ops."""
    costs = np.array([config.intervention_costs[op] for op in LifecycleOp])
    return -costs[t.actions[:, OP]]


def action_shaping(t: Transition, config: ContributionRewardConfig) -> np.ndarray:
    """[E]: how wise the chosen op was for the seed it was applied to."""
    op, table = t.actions[:, OP], t.before.table
    shaping = np.zeros(len(op))
    for choice in (LifecycleOp.GERMINATE, LifecycleOp.CULL, LifecycleOp.FOSSILIZE):
        env = np.flatnonzero(op == choice)
        if len(env) == 0:
            continue
        at = (env, t.actions[env, SLOT])
        stage, c, gained = table.stage[at], table.contribution[at], table.total_improvement[at]
        if choice == LifecycleOp.GERMINATE:
            shaping[env] = terms.germinate_shaping(stage, config)
        elif choice == LifecycleOp.CULL:
            shaping[env] = terms.cull_shaping(stage, c, table.epochs_total[at], config)
        else:
            n = table.epochs_in_stage[at]
            shaping[env] = terms.fossilize_shaping(stage, c, gained, n, config)
    return shaping


def contributing_fossils(t: Transition, config: ContributionRewardConfig) -> np.ndarray:
    """[E]: fossils that, taken out now, would be missed."""
    table = t.after.table
    helps = table.contribution >= config.contributing_threshold
    return ((table.stage == SeedStage.FOSSILIZED) & helps).sum(axis=1)


def at_end(
    t: Transition,
    quantity: Callable[[Transition, ContributionRewardConfig], np.ndarray],
    config: ContributionRewardConfig,
) -> np.ndarray:
    """[E]: `quantity` in the last step of an episode that reached its length, else 0."""
    if not t.truncated.any():
        return np.zeros(len(t.truncated))
    return np.where(t.truncated, quantity(t, config), 0.0)


MODES: dict[str, Callable[[Transition, ContributionRewardConfig, float], Parts]] = {
    "shaped": shaped,
    "simplified": simplified,
    "sparse": sparse,
    "minimal": minimal,
}
