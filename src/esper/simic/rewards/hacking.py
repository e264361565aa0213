"""Finds seeds whose contribution does not fit the improvement of the network."""

import numpy as np

from esper.growth.slot_table import SlotTable
from esper.leyline import constants as k
from esper.leyline.events import RewardHackingSuspected
from esper.tolaria.engine.transition import Transition


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
