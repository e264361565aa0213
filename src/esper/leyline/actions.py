"""What a controller can do: an operation, and the choices that the operation needs."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

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
