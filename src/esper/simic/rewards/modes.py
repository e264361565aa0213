"""The table of rewards, and the function that computes them.

To add a reward, add an entry to `MODES` with its config and function. To add a term, add an entry
to the dict that the function of a mode returns, in `Shaping(...)` if it only guides the learner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.growth.slot_table import SlotTable
from esper.leyline import HOLDS_SEED, IS_LIVE, OP, SLOT, ConfigError, LifecycleOp, SeedStage
from esper.leyline import constants as k
from esper.leyline.events import RewardHackingSuspected
from esper.simic.rewards import terms
from esper.simic.rewards.config import (
    BudgetRewardConfig,
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
    RewardConfig,
    check_gamma,
)
from esper.simic.rewards.terms import RewardComponents, Shaping, Terms
from esper.tolaria.engine.event_log import Transition


def suspected(table: SlotTable, ratio_threshold: float) -> dict[str, np.ndarray]:
    """bool[E, S] by pattern.

    ransomware     the network needs the seed and got worse since its germination
    disproportion  the seed contributes at least `ratio_threshold` times the improvement
    """
    c, gained = table.contribution, table.total_improvement
    return {
        "ransomware": (c > k.HACKING_MIN_CONTRIBUTION) & (gained < k.RANSOMWARE_DEGRADATION),
        "disproportion": (gained > 0.0) & (c > 0.0) & (c >= ratio_threshold * gained),
    }


def suspicions(t: Transition, ratio_threshold: float) -> tuple[RewardHackingSuspected, ...]:
    """One event for each seed that was not suspected before this step and is after it."""
    before = suspected(t.before.table, ratio_threshold)
    return tuple(
        _event(t, pattern, env, slot)
        for pattern, now in suspected(t.after.table, ratio_threshold).items()
        for env, slot in np.argwhere(now & ~before[pattern] & t.acted[:, None]).tolist()
    )


def _event(t: Transition, pattern: str, env: int, slot: int) -> RewardHackingSuspected:
    table = t.after.table
    contribution = float(table.contribution[env, slot])
    gained = float(table.total_improvement[env, slot])
    critical = pattern == "ransomware"
    return RewardHackingSuspected(
        env=env,
        step=t.after.step,
        module=t.after.slot_config.names[slot],
        slot_id=t.after.slot_config.slot_ids[slot],
        blueprint=t.after.catalogue[table.blueprint[env, slot]].name,
        pattern=pattern,
        severity="critical" if critical else "warning",
        contribution=contribution,
        total_improvement=gained,
        ratio=None if critical else contribution / gained,
    )


def objective(t: Transition, config: ObjectiveRewardConfig, gamma: float) -> Terms:
    """Pays differences only: no action, stage or passing of time earns anything.

    Over an episode 'score' sums to (final - initial score) / 100, 'params' to the growth of the
    network relative to its host, 'compute' to the share of compute that growth added.
    """
    before, after = t.before, t.after
    gained = (after.signals.val_score - before.signals.val_score) / 100.0
    grown = (after.total_params - before.total_params) / after.host_params
    extra = (t.train_macs - t.host_macs) / np.maximum(t.host_macs, 1) / after.max_steps
    return {
        "score": config.score_weight * gained,
        "params": -config.param_cost * grown,
        "compute": -config.compute_cost * extra,
        "rollback": -config.rollback_penalty * t.rolled_back,
    }


def budget(t: Transition, config: BudgetRewardConfig, gamma: float) -> Terms:
    """Compute has no price; the budget limits it.

    Over an episode 'score' sums to (score of the kept network - initial score) / 100, 'params' to
    its growth relative to the host. Where the transition does not name the kept network, it is
    the network at the end.
    """
    before, after = t.before, t.after
    score, params = after.signals.val_score, after.total_params
    if t.final_score is not None and t.final_params is not None:
        score = np.where(t.ended, t.final_score, score)
        params = np.where(t.ended, t.final_params, params)
    return {
        "score": config.score_weight * (score - before.signals.val_score) / 100.0,
        "params": -config.param_cost * (params - before.total_params) / after.host_params,
        "rollback": -config.rollback_penalty * t.terminated,
    }


def loss_reward(t: Transition, config: LossRewardConfig, gamma: float) -> Terms:
    """From the validation loss, for any task with a known range of it."""
    table, loss = t.after.table, t.after.signals.val_loss
    # Seeds pay no rent during their first epochs.
    charged = np.where(table.epochs_total >= config.grace_epochs, table.params, 0).sum(axis=1)
    shaping = terms.pbrs(t, gamma, epoch_bonus=0.0, max_bonus=0.0)
    return {
        "loss": loss_delta_reward(t.before.signals.val_loss, loss, config),
        "rent": terms.rent(charged, t.after.host_params, config.rent_weight, config.max_rent),
        "pbrs": Shaping(config.pbrs_weight * shaping),
        "terminal_loss": np.where(t.truncated, terminal_loss_reward(loss, config), 0.0),
        "rollback": -config.rollback_penalty * t.rolled_back,
    }


def loss_delta_reward(
    before: np.ndarray, after: np.ndarray, config: LossRewardConfig
) -> np.ndarray:
    """Positive when the loss fell; 0 without a loss before."""
    change = (after - before) / config.typical_loss_delta_std
    change = np.clip(change, -config.max_loss_delta, config.max_loss_delta)
    change = np.where(change > 0.0, config.regression_penalty_scale * change, change)
    return np.where(np.isnan(before), 0.0, -config.loss_delta_weight * change)


def terminal_loss_reward(loss: np.ndarray, config: LossRewardConfig) -> np.ndarray:
    """How far the loss is from the baseline to the target, in [0, 1], weighted."""
    span = config.baseline_loss - config.target_loss
    return config.terminal_loss_weight * np.clip((config.baseline_loss - loss) / span, 0.0, 1.0)


def shaped(t: Transition, config: ContributionRewardConfig, gamma: float) -> Terms:
    """Lends credit for a contribution as soon as it is measured, and takes it back when the seed is
    removed or the episode ends: ablation overrates seeds that the host has adapted to, so in the
    end only the score of the network counts."""
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


@dataclass(frozen=True)
class RewardMode:
    """The class of a reward's settings, and its terms as a function of (transition of E
    environments, settings, gamma of the run). A mode that `reads_kept` seeds needs their
    contribution in every step."""

    config: type[RewardConfig]
    terms: Callable[[Transition, Any, float], Terms]
    reads_kept: bool = False


MODES = {
    "objective": RewardMode(ObjectiveRewardConfig, objective),
    "budget": RewardMode(BudgetRewardConfig, budget),
    "shaped": RewardMode(ContributionRewardConfig, shaped, reads_kept=True),
    "simplified": RewardMode(ContributionRewardConfig, simplified, reads_kept=True),
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
