"""Stages of a seed and their legal transitions, and the actions of a controller."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class SeedStage(IntEnum):
    """The stage of a slot and its seed. Value 5 is reserved and never used."""

    UNKNOWN = 0
    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 6
    FOSSILIZED = 7
    CULLED = 8
    EMBARGOED = 9
    RESETTING = 10


VALID_TRANSITIONS: dict[SeedStage, frozenset[SeedStage]] = {
    SeedStage.UNKNOWN: frozenset({SeedStage.DORMANT}),
    SeedStage.DORMANT: frozenset({SeedStage.GERMINATED}),
    SeedStage.GERMINATED: frozenset({SeedStage.TRAINING, SeedStage.CULLED}),
    SeedStage.TRAINING: frozenset({SeedStage.BLENDING, SeedStage.CULLED}),
    SeedStage.BLENDING: frozenset({SeedStage.HOLDING, SeedStage.CULLED}),
    SeedStage.HOLDING: frozenset({SeedStage.FOSSILIZED, SeedStage.CULLED}),
    SeedStage.FOSSILIZED: frozenset(),
    SeedStage.CULLED: frozenset({SeedStage.EMBARGOED}),
    SeedStage.EMBARGOED: frozenset({SeedStage.RESETTING}),
    SeedStage.RESETTING: frozenset({SeedStage.DORMANT}),
}


# Legal only for `lifecycle.remove_kept`, after a grace period.
REMOVAL_OF_KEPT = (SeedStage.FOSSILIZED, SeedStage.CULLED)


class GateLevel(IntEnum):
    """Level 4 is reserved and never used."""

    G0 = 0
    G1 = 1
    G2 = 2
    G3 = 3
    G5 = 5


GATE_FOR_TARGET: dict[SeedStage, GateLevel] = {
    SeedStage.GERMINATED: GateLevel.G0,
    SeedStage.TRAINING: GateLevel.G1,
    SeedStage.BLENDING: GateLevel.G2,
    SeedStage.HOLDING: GateLevel.G3,
    SeedStage.FOSSILIZED: GateLevel.G5,
}


def _lookup(*stages: SeedStage) -> np.ndarray:
    """Bool array, indexed by stage values: is each one in `stages`?"""
    return np.isin(np.arange(max(SeedStage) + 1), stages)


# A live seed can still be culled.
IS_LIVE = _lookup(SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
HOLDS_SEED = IS_LIVE | _lookup(SeedStage.FOSSILIZED)
# An active seed is in the forward pass.
IS_ACTIVE = HOLDS_SEED & ~_lookup(SeedStage.GERMINATED)
# A blended seed acts on the network's output, so it has a counterfactual.
IS_BLENDED = IS_ACTIVE & ~_lookup(SeedStage.TRAINING)
# Fully blended: alpha is 1, and a gated blend does not need its valve any more.
IS_FULL = IS_BLENDED & ~_lookup(SeedStage.BLENDING)
# LEGAL_TRANSITION[from, to]: VALID_TRANSITIONS as an array.
LEGAL_TRANSITION = np.zeros((max(SeedStage) + 1,) * 2, dtype=bool)
for _source, _targets in VALID_TRANSITIONS.items():
    LEGAL_TRANSITION[_source, list(_targets)] = True
for _table in (IS_LIVE, HOLDS_SEED, IS_ACTIVE, IS_BLENDED, IS_FULL, LEGAL_TRANSITION):
    _table.setflags(write=False)


HEAD_NAMES = ("slot", "blueprint", "blend", "op")
SLOT, BLUEPRINT, BLEND, OP = range(len(HEAD_NAMES))


class LifecycleOp(IntEnum):
    WAIT = 0
    GERMINATE = 1
    CULL = 2
    FOSSILIZE = 3


NUM_OPS = len(LifecycleOp)

RELEVANT_HEADS: dict[LifecycleOp, frozenset[str]] = {
    LifecycleOp.WAIT: frozenset({"op"}),
    LifecycleOp.GERMINATE: frozenset({"op", "slot", "blueprint", "blend"}),
    LifecycleOp.CULL: frozenset({"op", "slot"}),
    LifecycleOp.FOSSILIZE: frozenset({"op", "slot"}),
}
# HEAD_RELEVANCE[op, head]: the same table as an array; heads as in HEAD_NAMES.
HEAD_RELEVANCE = np.array(
    [[name in RELEVANT_HEADS[op] for name in HEAD_NAMES] for op in LifecycleOp]
)
HEAD_RELEVANCE.setflags(write=False)

BLEND_NAMES = ("linear", "sigmoid", "gated")


@dataclass(frozen=True)
class ActionMasks:
    """Which actions are legal, for each of E environments, S slots and B blueprints (bool arrays).

    op         [E, NUM_OPS]
    slot       [E, NUM_OPS, S]  the slots on which each op would succeed (WAIT: all)
    blueprint  [E, S, B]        the blueprints that fit each slot and the budget
    blend      [E, len(BLEND_NAMES)]

    Draw the op first, then a slot from `slot[e, op]`, then a blueprint from `blueprint[e, slot]`:
    an illegal combination cannot be drawn. Rows of heads that the op does not need may be empty.
    """

    op: np.ndarray
    slot: np.ndarray
    blueprint: np.ndarray
    blend: np.ndarray

    def allows(self, actions: np.ndarray) -> np.ndarray:
        """bool[E]: is each row of `actions` [E, 4] (HEAD_NAMES order) legal?"""
        envs = np.arange(len(actions))
        slot, blueprint, blend, op = np.asarray(actions).T
        germinates = op == LifecycleOp.GERMINATE
        return (
            self.op[envs, op]
            & ((op == LifecycleOp.WAIT) | self.slot[envs, op, slot])
            & (~germinates | (self.blueprint[envs, slot, blueprint] & self.blend[envs, blend]))
        )
