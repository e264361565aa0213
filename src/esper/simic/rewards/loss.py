"""The loss family: rewards from the validation loss, for any task with a known range of it."""

import numpy as np

from esper.growth.slot_table import SlotTable
from esper.simic.rewards.components import Hint, Parts
from esper.simic.rewards.config import LossRewardConfig
from esper.simic.rewards.potential import STAGE_POTENTIAL, pbrs
from esper.simic.rewards.terms import rent
from esper.tolaria.engine.transition import Transition


def loss_delta_reward(
    before: np.ndarray, after: np.ndarray, config: LossRewardConfig
) -> np.ndarray:
    """Positive when the loss fell; 0 if there is no loss before to compare with."""
    change = (after - before) / config.typical_loss_delta_std
    change = np.clip(change, -config.max_loss_delta, config.max_loss_delta)
    change = np.where(change > 0.0, config.regression_penalty_scale * change, change)
    return np.where(np.isnan(before), 0.0, -config.loss_delta_weight * change)


def terminal_loss_reward(loss: np.ndarray, config: LossRewardConfig) -> np.ndarray:
    """How far the loss went from the baseline to the target, in [0, 1], weighted."""
    span = config.baseline_loss - config.target_loss
    return config.terminal_loss_weight * np.clip((config.baseline_loss - loss) / span, 0.0, 1.0)


def rent_bearing_params(table: SlotTable, grace_epochs: int) -> np.ndarray:
    """[E]: parameters of the seeds that are past their grace."""
    return np.where(table.epochs_total >= grace_epochs, table.params, 0).sum(axis=1)


def stage_potential(table: SlotTable) -> np.ndarray:
    """[E]: potential of the stages alone, summed over slots."""
    return STAGE_POTENTIAL[table.stage].sum(axis=1)


def loss_reward(t: Transition, config: LossRewardConfig, gamma: float) -> Parts:
    before, after = t.before, t.after
    bearing = rent_bearing_params(after.table, config.grace_epochs)
    shaping = pbrs(stage_potential(before.table), stage_potential(after.table), t.ended, gamma)
    final = np.where(t.truncated, terminal_loss_reward(after.signals.val_loss, config), 0.0)
    return {
        "loss": loss_delta_reward(before.signals.val_loss, after.signals.val_loss, config),
        "rent": rent(bearing, after.host_params, config.rent_weight, config.max_rent),
        "pbrs": Hint(config.pbrs_weight * shaping),
        "terminal_loss": final,
        "rollback": -config.rollback_penalty * t.rolled_back,
    }
