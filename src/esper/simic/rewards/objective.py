"""The objective itself: final score minus initial score minus costs, in differences. With a budget
the final score is that of the network that is kept."""

import numpy as np

from esper.simic.rewards.components import Parts
from esper.simic.rewards.config import BudgetRewardConfig, ObjectiveRewardConfig
from esper.tolaria.engine.transition import Transition


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


def budget(t: Transition, config: BudgetRewardConfig, gamma: float) -> Parts:
    """Compute costs nothing but what it takes of the budget.

    Over an episode 'score' sums to (score of what is kept - score at the start) / 100, 'params' to
    its growth relative to the host. What is kept is known where episodes are settled, as they are
    in training; elsewhere it is the network as it is at the end.
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
