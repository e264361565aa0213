"""The lifecycle of all seeds at once: every function changes the SlotTable it is given.

Nothing moves between stages except through `move`, which refuses an illegal transition.
"""

from dataclasses import dataclass

import numpy as np

from esper.growth.alpha import scheduled_alpha
from esper.growth.gates import LifecycleRules, gate_passes
from esper.growth.slot_table import SlotTable
from esper.leyline import (
    IS_LIVE,
    LEGAL_TRANSITION,
    GateLevel,
    InvalidStateMachineError,
    SeedStage,
)
from esper.leyline.constants import EMBARGO_STEPS, MAX_BLENDING_DAMAGE, RESETTING_STEPS


@dataclass(frozen=True)
class StageChange:
    """The slots (bool[E, S]) that went from `source` (int[E, S]) to `target`, and why if culled."""

    where: np.ndarray
    source: np.ndarray
    target: SeedStage
    reason: str | None = None


def move(
    table: SlotTable, where: np.ndarray, target: SeedStage, reason: str | None = None
) -> StageChange:
    """Take slots to `target`; raises InvalidStateMachineError if that is illegal for any."""
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
    """Enter a new seed; `score` is the network's validation score before it."""
    where = one_slot(table, env, slot)
    table.clear(where & (table.stage == SeedStage.DORMANT))
    table.score[where] = table.score_at_birth[where] = score
    change = move(table, where, SeedStage.GERMINATED)
    table.blueprint[where], table.blend[where] = blueprint, blend
    table.params[where], table.macs[where] = params, macs
    return change


def cull(table: SlotTable, where: np.ndarray, reason: str) -> StageChange:
    """Give up seeds; the slots cool down before they can be used again."""
    change = move(table, where, SeedStage.CULLED, reason)
    table.forget(where)
    table.epochs_total[where] = 0
    return change


def fossilize(table: SlotTable, where: np.ndarray) -> StageChange:
    """Keep seeds for good."""
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
    """What happens by itself at the end of an epoch, in the environments of `envs` (bool[E]).

    Every slot moves at most one stage, except that 'joint' incubation passes through TRAINING.
    """
    start = table.stage.copy()

    def at(stage: SeedStage) -> np.ndarray:
        return envs[:, None] & (start == stage) & (table.stage == stage)

    blending = at(SeedStage.BLENDING)
    changes = [
        cull(table, envs[:, None] & IS_LIVE[start] & ~table.healthy, "unhealthy"),
        # Soon the host would depend on it, and the harm would look like a contribution.
        cull(table, blending & (table.contribution <= -MAX_BLENDING_DAMAGE), "blending_damage"),
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

    can_start = envs[:, None] & (table.stage == SeedStage.TRAINING)
    if rules.incubation == "isolated":
        can_start &= start == SeedStage.TRAINING
    begun = move(table, can_start & gate_passes(GateLevel.G2, table, rules), SeedStage.BLENDING)
    # A ramp starts at its first step, not at zero: a seed that counts as blending takes part.
    ramping = begun.where | (blending & ~done)
    table.alpha_step[ramping] += 1
    ramp = scheduled_alpha(np.maximum(table.blend, 0), table.alpha_step, rules.blending_steps)
    table.alpha[ramping] = ramp[ramping]
    return [held, begun]
