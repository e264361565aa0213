"""Finds seeds whose contribution does not fit the improvement of the network."""

from collections.abc import Callable
from functools import partial

import numpy as np

from esper.growth.slot_table import SlotTable
from esper.leyline import constants as c
from esper.leyline.events import RewardHackingSuspected
from esper.tolaria.engine.transition import Transition


def ransomware(table: SlotTable) -> np.ndarray:
    """bool[E, S]: the network needs the seed and got worse since its germination."""
    return (table.contribution > c.HACKING_MIN_CONTRIBUTION) & (
        table.total_improvement < c.RANSOMWARE_DEGRADATION
    )


def disproportion(table: SlotTable, ratio_threshold: float) -> np.ndarray:
    """bool[E, S]: the seed contributes at least `ratio_threshold` times the improvement."""
    gained = table.total_improvement
    return (
        (gained > 0.0)
        & (table.contribution > 0.0)
        & (table.contribution >= ratio_threshold * gained)
    )


def suspicions(t: Transition, ratio_threshold: float) -> tuple[RewardHackingSuspected, ...]:
    """One event for each seed that was not suspected before this step and is after it."""
    checks: dict[str, Callable[[SlotTable], np.ndarray]] = {
        "ransomware": ransomware,
        "disproportion": partial(disproportion, ratio_threshold=ratio_threshold),
    }
    events: list[RewardHackingSuspected] = []
    for pattern, check in checks.items():
        suspect = check(t.after.table) & t.acted[:, None]
        if suspect.any():
            begun = suspect & ~check(t.before.table)
            events += [_event(t, pattern, env, slot) for env, slot in np.argwhere(begun).tolist()]
    return tuple(events)


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
