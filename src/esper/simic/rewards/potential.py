"""Potential-based reward shaping (Ng, Harada and Russell, 1999).

F(s, s') = w (gamma Phi(s') - Phi(s)) leaves the optimal policy unchanged for the gamma of the
return. Over an episode it telescopes: sum_t gamma^t F_t = -w Phi(s_0), because Phi is 0 at its end.
"""

import numpy as np

from esper.growth.slot_table import SlotTable
from esper.leyline import SeedStage
from esper.leyline import constants as c
from esper.tolaria.engine.transition import Transition

# Indexed by stage value.
STAGE_POTENTIAL = np.zeros(max(SeedStage) + 1)
for _name, _value in c.STAGE_POTENTIAL.items():
    STAGE_POTENTIAL[SeedStage[_name]] = _value
STAGE_POTENTIAL.setflags(write=False)


def seed_potential(
    stage: np.ndarray,
    epochs_in_stage: np.ndarray,
    epoch_bonus: float = c.EPOCH_PROGRESS_BONUS,
    max_bonus: float = c.MAX_PROGRESS_BONUS,
) -> np.ndarray:
    """phi(stage) plus a bounded bonus for the epochs spent in it; 0 for a slot without a seed."""
    worth = STAGE_POTENTIAL[stage]
    return worth + (worth > 0) * np.minimum(epoch_bonus * epochs_in_stage, max_bonus)


def table_potential(
    table: SlotTable,
    epoch_bonus: float = c.EPOCH_PROGRESS_BONUS,
    max_bonus: float = c.MAX_PROGRESS_BONUS,
) -> np.ndarray:
    """[E]: the potential of a state, summed over its slots."""
    potential = seed_potential(table.stage, table.epochs_in_stage, epoch_bonus, max_bonus)
    return potential.sum(axis=1)


def pbrs(before: np.ndarray, after: np.ndarray, ended: np.ndarray, gamma: float) -> np.ndarray:
    """[E]: gamma Phi(s') - Phi(s); what ended has no potential."""
    assert before.shape == after.shape == ended.shape
    return gamma * np.where(ended, 0.0, after) - before


def table_pbrs(
    transition: Transition,
    gamma: float,
    epoch_bonus: float = c.EPOCH_PROGRESS_BONUS,
    max_bonus: float = c.MAX_PROGRESS_BONUS,
) -> np.ndarray:
    """[E]: unweighted shaping of a step of the environment."""
    before = table_potential(transition.before.table, epoch_bonus, max_bonus)
    after = table_potential(transition.after.table, epoch_bonus, max_bonus)
    return pbrs(before, after, transition.ended, gamma)
