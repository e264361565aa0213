"""The lifecycle of all seeds at once: alpha schedules, gates, and automatic stage changes.

Every function works on the whole SlotTable. Stages change only through `move`, which refuses an
illegal transition. A value that was not measured is NaN, and every comparison with NaN fails a
gate. To add an alpha schedule, add a function of progress in [0, 1] to SCHEDULES, and its name to
BLEND_NAMES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from esper.growth.slot_table import SlotTable
from esper.leyline import (
    BLEND_NAMES,
    IS_LIVE,
    LEGAL_TRANSITION,
    GateLevel,
    InvalidStateMachineError,
    SeedStage,
)
from esper.leyline import constants as c
from esper.leyline.constants import EMBARGO_STEPS, MAX_BLENDING_DAMAGE, RESETTING_STEPS

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


@dataclass(frozen=True)
class LifecycleRules:
    """Timing and thresholds of the lifecycle; epochs are environment steps.

    max_steps    length of the episode, which scales two of the timings
    incubation   'isolated': a seed learns without acting before it is blended in;
                 'joint': it acts in full from the start, when it changes nothing yet
    min_fossilize_contribution   of a kept seed, in units of the score's noise
    """

    max_steps: int
    incubation: Literal["isolated", "joint"] = "isolated"
    blending_steps: int = c.BLENDING_TOTAL_STEPS
    min_gradient_ratio: float = c.GRADIENT_RATIO_THRESHOLD
    min_fossilize_contribution: float = c.MIN_FOSSILIZE_CONTRIBUTION

    @property
    def training_epochs(self) -> int:
        return max(c.MIN_TRAINING_EPOCHS, int(self.max_steps * c.TRAIN_TO_BLEND_FRACTION))

    @property
    def holding_epochs(self) -> int:
        return max(c.MAX_HOLDING_EPOCHS, int(self.max_steps * c.HOLDING_EPOCHS_FRACTION))


def gate_checks(gate: GateLevel, table: SlotTable, rules: LifecycleRules) -> dict[str, np.ndarray]:
    """The checks of a gate by name, each bool[E, S]; a seed passes if all are True."""
    if gate == GateLevel.G0:
        return {"blueprint_present": table.blueprint >= 0}
    if gate == GateLevel.G1:
        return {"germinated": table.stage == SeedStage.GERMINATED}
    if gate == GateLevel.G2:
        return {
            "seed_ready": table.epochs_in_stage >= rules.training_epochs,
            "seed_gradient_active": table.gradient_ratio >= rules.min_gradient_ratio,
        }
    if gate == GateLevel.G3:
        least = min(c.MIN_BLENDING_EPOCHS, rules.blending_steps)
        return {
            "blending_complete": table.epochs_in_stage >= least,
            "alpha_high": table.alpha >= c.ALPHA_COMPLETE_THRESHOLD,
        }
    return {
        "counterfactual_available": ~np.isnan(table.contribution),
        "sufficient_contribution": table.contribution
        > rules.min_fossilize_contribution * table.noise,
        "healthy": table.healthy,
    }


def gate_passes(gate: GateLevel, table: SlotTable, rules: LifecycleRules) -> np.ndarray:
    """bool[E, S]"""
    return np.logical_and.reduce(list(gate_checks(gate, table, rules).values()))


def failed_checks(
    gate: GateLevel, table: SlotTable, rules: LifecycleRules, env: int, slot: int
) -> tuple[str, ...]:
    """The checks of the gate that one seed does not pass."""
    checks = gate_checks(gate, table, rules)
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
    table: SlotTable, where: np.ndarray, target: SeedStage, reason: str | None = None
) -> StageChange:
    """Move slots to `target`; raises InvalidStateMachineError if that is illegal for any."""
    source = table.stage.copy()
    illegal = where & ~LEGAL_TRANSITION[source, target]
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


def act_from_start(table: SlotTable, where: np.ndarray, rules: LifecycleRules) -> list[StageChange]:
    """Joint incubation: new seeds (bool[E, S]) go straight to the end of their ramp."""
    changes = [move(table, where, SeedStage.TRAINING), move(table, where, SeedStage.BLENDING)]
    table.alpha_step[where], table.alpha[where] = rules.blending_steps, 1.0
    return changes


def cull(table: SlotTable, where: np.ndarray, reason: str) -> StageChange:
    """Remove seeds; the slots rest before they can be used again."""
    change = move(table, where, SeedStage.CULLED, reason)
    table.clear(where, keep_slot=True)
    table.epochs_total[where] = 0
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


def tick(table: SlotTable, rules: LifecycleRules, envs: np.ndarray) -> list[StageChange]:
    """Automatic stage changes at the end of an epoch, in the environments of `envs` (bool[E]).

    Every slot moves at most one stage.
    """
    start = table.stage.copy()

    def at(stage: SeedStage) -> np.ndarray:
        return envs[:, None] & (start == stage) & (table.stage == stage)

    blending = at(SeedStage.BLENDING)
    changes = [
        cull(table, envs[:, None] & IS_LIVE[start] & ~table.healthy, "unhealthy"),
        # Later the host would depend on the seed, and the harm would look like a contribution.
        cull(
            table,
            blending & (table.contribution < -MAX_BLENDING_DAMAGE * table.noise),
            "blending_damage",
        ),
        move(table, at(SeedStage.GERMINATED), SeedStage.TRAINING),
    ]
    changes += _blend(table, rules, envs, start)
    holding = at(SeedStage.HOLDING)
    changes += [
        cull(table, holding & (table.contribution <= 0.0), "negative_counterfactual"),
        cull(
            table,
            at(SeedStage.HOLDING) & (table.epochs_in_stage >= rules.holding_epochs),
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
    table: SlotTable, rules: LifecycleRules, envs: np.ndarray, start: np.ndarray
) -> list[StageChange]:
    """Advance the ramps, finish those that are done, and start those that pass their gate."""
    blending = envs[:, None] & (start == SeedStage.BLENDING) & (table.stage == start)
    done = blending & (table.alpha_step >= rules.blending_steps)
    held = move(table, done & gate_passes(GateLevel.G3, table, rules), SeedStage.HOLDING)
    table.alpha[held.where] = 1.0

    can_start = envs[:, None] & (start == SeedStage.TRAINING) & (table.stage == start)
    begun = move(table, can_start & gate_passes(GateLevel.G2, table, rules), SeedStage.BLENDING)
    # A ramp starts at its first step, not at zero: a blending seed always acts.
    ramping = begun.where | (blending & ~done)
    table.alpha_step[ramping] += 1
    ramp = scheduled_alpha(np.maximum(table.blend, 0), table.alpha_step, rules.blending_steps)
    table.alpha[ramping] = ramp[ramping]
    return [held, begun]
