"""Looks for seeds whose contribution does not fit what the network gained."""

import numpy as np

from esper.growth import SlotTable
from esper.leyline import constants as c
from esper.leyline.events import RewardHackingSuspected
from esper.tolaria import Transition


def ransomware(table: SlotTable) -> np.ndarray:
    """bool[E, S]: the network depends on the seed and got worse since its germination."""
    return (table.contribution > c.HACKING_MIN_CONTRIBUTION) & (
        table.total_improvement < c.RANSOMWARE_DEGRADATION
    )


def disproportion(table: SlotTable, ratio_threshold: float) -> np.ndarray:
    """bool[E, S]: the seed contributes at least `ratio_threshold` times what was gained."""
    gained = table.total_improvement
    return (
        (gained > 0.0)
        & (table.contribution > 0.0)
        & (table.contribution >= ratio_threshold * gained)
    )


def suspicions(
    t: Transition, ratio_threshold: float = c.HACKING_RATIO_THRESHOLD
) -> tuple[RewardHackingSuspected, ...]:
    """Seeds that came under suspicion in this step; one that stays so is not named again."""
    before, after, acted = t.before.table, t.after.table, t.acted[:, None]
    same_seed = before.holds_seed
    found = {
        "ransomware": ransomware(after) & ~(ransomware(before) & same_seed) & acted,
        "disproportion": disproportion(after, ratio_threshold)
        & ~(disproportion(before, ratio_threshold) & same_seed)
        & acted,
    }
    return tuple(
        _event(t, pattern, env, slot)
        for pattern, where in found.items()
        if where.any()
        for env, slot in np.argwhere(where).tolist()
    )


def _event(t: Transition, pattern: str, env: int, slot: int) -> RewardHackingSuspected:
    table = t.after.table
    contribution = float(table.contribution[env, slot])
    gained = float(table.total_improvement[env, slot])
    critical = pattern == "ransomware"
    return RewardHackingSuspected(
        env=env,
        step=t.after.step,
        slot_id=t.after.slot_config.slot_ids[slot],
        blueprint=t.after.catalogue[table.blueprint[env, slot]].name,
        pattern=pattern,
        severity="critical" if critical else "warning",
        contribution=contribution,
        total_improvement=gained,
        ratio=None if critical else contribution / gained,
    )
