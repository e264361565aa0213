"""Rewards for what the network achieves: its validation score minus costs, or its loss."""

import numpy as np

from esper.simic.rewards.components import Shaping, Terms
from esper.simic.rewards.config import (
    BudgetRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
)
from esper.simic.rewards.terms import pbrs, rent
from esper.tolaria.engine.transition import Transition


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
    shaping = pbrs(t, gamma, epoch_bonus=0.0, max_bonus=0.0)
    return {
        "loss": loss_delta_reward(t.before.signals.val_loss, loss, config),
        "rent": rent(charged, t.after.host_params, config.rent_weight, config.max_rent),
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
