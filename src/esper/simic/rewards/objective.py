"""The objective itself: final score minus initial score minus costs, in differences."""

import numpy as np

from esper.simic.rewards.components import Parts
from esper.simic.rewards.config import ObjectiveRewardConfig
from esper.tolaria import Transition


def objective(t: Transition, config: ObjectiveRewardConfig, gamma: float) -> Parts:
    """No action, stage or time is paid for, so there is nothing to farm.

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
