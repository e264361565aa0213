"""Which actions are legal: exactly those that execution accepts."""

from dataclasses import dataclass

import numpy as np

from esper.growth.blueprints.catalogue import NOOP, BlueprintCatalogue
from esper.growth.lifecycle import gate_passes, removable
from esper.growth.slot_table import SlotTable
from esper.leyline import (
    BLEND_NAMES,
    IS_LIVE,
    NUM_OPS,
    ActionMasks,
    GateLevel,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.constants import MIN_CULL_AGE
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.policy.masked_categorical import MaskedCategorical
from esper.tamiyo.situation import Situation

__all__ = ["GrowthLimits", "MaskedCategorical", "compute_action_masks"]


@dataclass(frozen=True)
class GrowthLimits:
    """Which blueprints fit, what they cost, and the limits for all seeds together.

    fits, params, macs  [S, B], whether a blueprint fits a slot, and its cost there
    max_params          most parameters of all seeds, None for no limit
    max_macs            most multiply-adds per example of all seeds
    max_seeds           most seeds at a time, including kept ones
    """

    fits: np.ndarray
    params: np.ndarray
    macs: np.ndarray
    max_params: int | None = None
    max_macs: int | None = None
    max_seeds: int | None = None

    @property
    def affordable(self) -> np.ndarray:
        """bool[S, B]: fits, and would be within the limits as the only seed."""
        within = self.fits.copy()
        for most, cost in ((self.max_params, self.params), (self.max_macs, self.macs)):
            if most is not None:
                within &= cost <= most
        return within


def usable_blueprints(catalogue: BlueprintCatalogue, fits: np.ndarray) -> np.ndarray:
    """bool[S, B]: the blueprints that fit a slot, without NOOP."""
    return fits & (np.array(catalogue.names) != NOOP)


def compute_action_masks(
    table: SlotTable,
    limits: GrowthLimits,
    settings: GrowthSettings,
    running: np.ndarray,
    payable: np.ndarray | None = None,
) -> ActionMasks:
    """Masks for E environments; where `running` (bool[E]) is False only WAIT is legal. `payable`
    (bool[E, S, B]) are the candidates within the remaining budget, None for all."""
    n_envs, n_slots = table.shape
    blueprint = np.broadcast_to(limits.fits, (n_envs, *limits.fits.shape)).copy()
    for limit, cost, used in (
        (limits.max_params, limits.params, table.params),
        (limits.max_macs, limits.macs, table.macs),
    ):
        if limit is not None:
            left = limit - used.sum(axis=1)
            blueprint &= cost[None] <= left[:, None, None]
    if payable is not None:
        blueprint &= payable
    below_limit = np.full(n_envs, True)
    if limits.max_seeds is not None:
        below_limit = table.holds_seed.sum(axis=1) < limits.max_seeds

    slot = np.zeros((n_envs, NUM_OPS, n_slots), dtype=bool)
    slot[:, LifecycleOp.WAIT] = True
    slot[:, LifecycleOp.GERMINATE] = (
        (table.stage == SeedStage.DORMANT) & blueprint.any(axis=2) & below_limit[:, None]
    )
    live = IS_LIVE[table.stage] & (table.epochs_total >= MIN_CULL_AGE)
    slot[:, LifecycleOp.CULL] = live | removable(table, settings)
    slot[:, LifecycleOp.FOSSILIZE] = (table.stage == SeedStage.HOLDING) & gate_passes(
        GateLevel.G5, table, settings
    )
    slot[:, 1:] &= running[:, None, None]
    return ActionMasks(
        op=np.asarray(slot.any(axis=2)),
        slot=slot,
        blueprint=blueprint,
        blend=np.ones((n_envs, len(BLEND_NAMES)), dtype=bool),
    )


# A policy may see only some of the candidates.
NO_CANDIDATE = "does not fit the slot, or is not what the policy has learnt with"


def why_no_op(s: Situation, env: int, op: LifecycleOp) -> str | None:
    """None if the op is legal."""
    if s.masks.op[env, op]:
        return None
    if not s.running[env]:
        return "the episode is over"
    reasons = {why_no_slot(s, env, op, slot) for slot in range(s.slot_config.num_slots)}
    if len(reasons) == 1:
        return f"every slot: {reasons.pop()}"
    return {
        LifecycleOp.GERMINATE: "no slot is free for a seed that fits and can be paid for",
        LifecycleOp.CULL: "no live seed is old enough",
        LifecycleOp.FOSSILIZE: "no seed is HOLDING and has passed gate G5",
    }[op]


def why_no_slot(s: Situation, env: int, op: LifecycleOp, slot: int) -> str | None:
    """Why the op cannot be done in a slot; None if it can."""
    if s.masks.slot[env, op, slot]:
        return None
    if not s.running[env]:
        return "the episode is over"
    stage = SeedStage(s.table.stage[env, slot])
    if op == LifecycleOp.GERMINATE:
        if s.table.holds_seed[env, slot]:
            return f"its seed is {stage.name}"
        if stage != SeedStage.DORMANT:
            return f"it rests ({stage.name})"
        if not s.masks.blueprint[env, slot].any():
            return "no blueprint fits it and what is left to spend"
        return f"the network holds {s.max_seeds} seeds, as many as it may"
    if op == LifecycleOp.CULL:
        if stage == SeedStage.FOSSILIZED:
            return "its seed is kept, and not audited now"
        if not IS_LIVE[stage]:
            return f"it holds no live seed ({stage.name})"
        return f"its seed is not {MIN_CULL_AGE} epochs old"
    if stage != SeedStage.HOLDING:
        return f"it is {stage.name}, not HOLDING"
    return "its seed has not passed gate G5"


def why_no_blueprint(s: Situation, env: int, slot: int, blueprint: int) -> str | None:
    """Why a blueprint cannot be planted in a slot; None if it can."""
    if s.masks.blueprint[env, slot, blueprint]:
        return None
    if s.facts is None:
        return "does not fit the slot, or costs more than is left"
    return "costs more than is left" if s.facts.fits[slot, blueprint] else NO_CANDIDATE
