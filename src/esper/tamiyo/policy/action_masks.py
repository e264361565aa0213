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
