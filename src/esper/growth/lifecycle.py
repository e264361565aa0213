"""The lifecycle of all seeds at once: alpha schedules, gates, and automatic stage changes.

Every function works on the whole SlotTable. Stages change only through `move`, which refuses an
illegal transition. A value that was not measured is NaN, and every comparison with NaN fails a
gate. To add an alpha schedule, add a function of progress in [0, 1] to SCHEDULES, and its name to
BLEND_NAMES.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from esper.growth.slot_table import SlotTable
from esper.leyline import (
    BLEND_NAMES,
    IS_LIVE,
    LEGAL_TRANSITION,
    REMOVAL_OF_KEPT,
    GateLevel,
    InvalidStateMachineError,
    SeedStage,
)
from esper.leyline import constants as c
from esper.leyline.constants import EMBARGO_STEPS, MAX_BLENDING_DAMAGE, RESETTING_STEPS
from esper.leyline.growth_settings import GrowthSettings

# --- alpha schedules -------------------------------------------------------------------------

SIGMOID_STEEPNESS = 12.0


def linear(progress: np.ndarray) -> np.ndarray:
    return progress


def sigmoid(progress: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-(progress - 0.5) * SIGMOID_STEEPNESS))


# A gated blend ramps linearly on average; a learned gate shifts it per sample on the way.
SCHEDULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": linear,
    "sigmoid": sigmoid,
    "gated": linear,
}
GATED = BLEND_NAMES.index("gated")


def scheduled_alpha(blend: ArrayLike, step: ArrayLike, total_steps: int) -> np.ndarray:
    """Alpha of each seed after `step` of `total_steps` blending steps; `blend` holds indices."""
    progress = np.clip(np.asarray(step, dtype=np.float64) / total_steps, 0.0, 1.0)
    by_name = np.stack([SCHEDULES[name](progress) for name in BLEND_NAMES])
    return np.take_along_axis(by_name, np.asarray(blend)[None], axis=0)[0]


# --- gates -----------------------------------------------------------------------------------


def gate_checks(
    gate: GateLevel, table: SlotTable, settings: GrowthSettings
) -> dict[str, np.ndarray]:
    """The checks of a gate by name, each bool[E, S]; a seed passes if all are True."""
    if gate == GateLevel.G0:
        return {"blueprint_present": table.blueprint >= 0}
    if gate == GateLevel.G1:
        return {"germinated": table.stage == SeedStage.GERMINATED}
    if gate == GateLevel.G2:
        return {
            "seed_ready": table.epochs_in_stage >= settings.training_epochs,
            "seed_gradient_active": table.gradient_ratio >= settings.min_gradient_ratio,
        }
    if gate == GateLevel.G3:
        least = min(c.MIN_BLENDING_EPOCHS, settings.blending_steps)
        return {
            "blending_complete": table.epochs_in_stage >= least,
            "alpha_high": table.alpha >= c.ALPHA_COMPLETE_THRESHOLD,
        }
    return {
        "counterfactual_available": ~np.isnan(table.contribution),
        "sufficient_contribution": table.contribution > settings.min_contribution * table.noise,
        "healthy": table.healthy,
    }


def gate_passes(gate: GateLevel, table: SlotTable, settings: GrowthSettings) -> np.ndarray:
    """bool[E, S]"""
    return np.logical_and.reduce(list(gate_checks(gate, table, settings).values()))


def failed_checks(
    gate: GateLevel, table: SlotTable, settings: GrowthSettings, env: int, slot: int
) -> tuple[str, ...]:
    """The checks of the gate that one seed does not pass."""
    checks = gate_checks(gate, table, settings)
    return tuple(name for name, passed in checks.items() if not passed[env, slot])


# --- stages ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageChange:
    """Slots (bool[E, S]) that went from `source` (int[E, S]) to `target`; `reason` of a cull."""

    where: np.ndarray
    source: np.ndarray
    target: SeedStage
    reason: str | None = None


def move(
    table: SlotTable,
    where: np.ndarray,
    target: SeedStage,
    reason: str | None = None,
    legal: np.ndarray = LEGAL_TRANSITION,
) -> StageChange:
    """Move slots to `target`; raises InvalidStateMachineError if that is not `legal` for any."""
    source = table.stage.copy()
    illegal = where & ~legal[source, target]
    if illegal.any():
        env, slot = np.argwhere(illegal)[0]
        raise InvalidStateMachineError(
            f"slot {slot} of environment {env} cannot go from "
            f"{SeedStage(source[env, slot]).name} to {target.name}"
        )
    table.previous_stage[where] = source[where]
    table.stage[where] = target
    table.epochs_in_stage[where] = 0
    table.score_at_stage_start[where] = table.score[where]
    return StageChange(where, source, target, reason)


def germinate(
    table: SlotTable,
    env: int,
    slot: int,
    *,
    blueprint: int,
    blend: int,
    params: int,
    macs: int,
    score: float,
) -> StageChange:
    """Add a new seed; `score` is the network's validation score before it."""
    where = one_slot(table, env, slot)
    table.clear(where & (table.stage == SeedStage.DORMANT))
    table.score[where] = table.score_at_birth[where] = score
    change = move(table, where, SeedStage.GERMINATED)
    table.blueprint[where], table.blend[where] = blueprint, blend
    table.params[where], table.macs[where] = params, macs
    return change


def act_from_start(
    table: SlotTable, where: np.ndarray, settings: GrowthSettings, *, fully: bool = True
) -> list[StageChange]:
    """New seeds (bool[E, S]) act at once: `fully`, as in joint incubation, or from the first step
    of their ramp on."""
    changes = [move(table, where, SeedStage.TRAINING), move(table, where, SeedStage.BLENDING)]
    step = settings.blending_steps if fully else 1
    table.alpha_step[where] = step
    ramp = scheduled_alpha(table.blend[where], table.alpha_step[where], settings.blending_steps)
    table.alpha[where] = 1.0 if fully else ramp
    return changes


def cull(table: SlotTable, where: np.ndarray, reason: str) -> StageChange:
    """Remove seeds; the slots rest before they can be used again."""
    return _emptied(table, move(table, where, SeedStage.CULLED, reason))


def removable(table: SlotTable, settings: GrowthSettings, ahead: int = 0) -> np.ndarray:
    """bool[E, S]: kept seeds that are audited now, or `ahead` epochs later, and so may then be
    removed."""
    every, age = settings.audit_every, table.epochs_in_stage + ahead
    if every is None:
        return np.zeros(table.shape, dtype=bool)
    return (table.stage == SeedStage.FOSSILIZED) & (age >= every) & (age % every == 0)


def remove_kept(table: SlotTable, where: np.ndarray, settings: GrowthSettings) -> StageChange:
    """Remove kept seeds; raises InvalidStateMachineError for one that is not audited now."""
    legal = np.zeros_like(LEGAL_TRANSITION)
    legal[REMOVAL_OF_KEPT] = not (where & ~removable(table, settings)).any()
    return _emptied(table, move(table, where, SeedStage.CULLED, "audit", legal))


def _emptied(table: SlotTable, change: StageChange) -> StageChange:
    table.clear(change.where, keep_slot=True)
    table.epochs_total[change.where] = 0
    return change


def fossilize(table: SlotTable, where: np.ndarray) -> StageChange:
    """Keep seeds permanently."""
    return move(table, where, SeedStage.FOSSILIZED)


def one_slot(table: SlotTable, env: int, slot: int) -> np.ndarray:
    where = np.zeros(table.shape, dtype=bool)
    where[env, slot] = True
    return where


def age(table: SlotTable, envs: np.ndarray) -> None:
    """One more epoch for every slot of the environments in `envs` (bool[E])."""
    table.epochs_in_stage[envs] += 1
    table.epochs_total[envs] += 1


def tick(
    table: SlotTable,
    settings: GrowthSettings,
    envs: np.ndarray,
    lasting: np.ndarray | bool = False,
) -> list[StageChange]:
    """Automatic stage changes at the end of an epoch, in the environments of `envs` (bool[E]).

    Every slot moves at most one stage. Seeds of `lasting` slots (bool[S]) are not removed for what
    they contribute: they have until the end of the run to prove themselves.
    """
    start = table.stage.copy()
    judged = np.broadcast_to(~np.asarray(lasting), table.shape)

    def at(stage: SeedStage) -> np.ndarray:
        return envs[:, None] & (start == stage) & (table.stage == stage)

    blending = at(SeedStage.BLENDING)
    changes = [
        cull(table, envs[:, None] & IS_LIVE[start] & ~table.healthy, "unhealthy"),
        # Later the host would depend on the seed, and the harm would look like a contribution.
        cull(
            table,
            blending & judged & (table.contribution < -MAX_BLENDING_DAMAGE * table.noise),
            "blending_damage",
        ),
        move(table, at(SeedStage.GERMINATED), SeedStage.TRAINING),
    ]
    changes += _blend(table, settings, envs, start)
    holding = at(SeedStage.HOLDING) & judged
    changes += [
        cull(table, holding & (table.contribution <= 0.0), "negative_counterfactual"),
        cull(
            table,
            at(SeedStage.HOLDING) & judged & (table.epochs_in_stage >= settings.holding_epochs),
            "holding_timeout",
        ),
    ]
    waited = table.epochs_in_stage
    changes += [
        move(table, at(SeedStage.CULLED), SeedStage.EMBARGOED),
        move(table, at(SeedStage.EMBARGOED) & (waited >= EMBARGO_STEPS), SeedStage.RESETTING),
        move(table, at(SeedStage.RESETTING) & (waited >= RESETTING_STEPS), SeedStage.DORMANT),
    ]
    return [change for change in changes if change.where.any()]


def _blend(
    table: SlotTable, settings: GrowthSettings, envs: np.ndarray, start: np.ndarray
) -> list[StageChange]:
    """Advance the ramps, finish those that are done, and start those that pass their gate."""
    blending = envs[:, None] & (start == SeedStage.BLENDING) & (table.stage == start)
    done = blending & (table.alpha_step >= settings.blending_steps)
    held = move(table, done & gate_passes(GateLevel.G3, table, settings), SeedStage.HOLDING)
    table.alpha[held.where] = 1.0

    can_start = envs[:, None] & (start == SeedStage.TRAINING) & (table.stage == start)
    begun = move(table, can_start & gate_passes(GateLevel.G2, table, settings), SeedStage.BLENDING)
    # A ramp starts at its first step, not at zero: a blending seed always acts.
    ramping = begun.where | (blending & ~done)
    table.alpha_step[ramping] += 1
    ramp = scheduled_alpha(np.maximum(table.blend, 0), table.alpha_step, settings.blending_steps)
    table.alpha[ramping] = ramp[ramping]
    return [held, begun]
