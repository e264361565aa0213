"""Two encodings of an action, and the masks of each.

A decision is a row (slot, blueprint, blend, op). Which slots are legal depends on the op, which
blueprints on the slot.

factored   one number for each head: a MultiDiscrete. The mask of a head cannot depend on the other
           heads, so it allows what occurs in some legal decision; a combination that is illegal
           all the same becomes WAIT.
flat       one number for every combination that can be legal: a Discrete with an exact mask.

`sizes` are the numbers of slots, blueprints, blends and ops. `space` is that of one environment.
`mask` returns bool [E, n], with at least one legal choice for each head. `rows` turns the actions
of E environments into decisions, int64 [E, 4]; it raises ConfigError for one outside `space`.
"""

from itertools import product
from typing import Any

import numpy as np
from gymnasium import spaces

from esper.leyline import ActionMasks, ConfigError, LifecycleOp, shortened


class FactoredActions:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.space: spaces.Space[Any] = spaces.MultiDiscrete(list(sizes))

    def mask(self, masks: ActionMasks) -> np.ndarray:
        # The other heads do not matter for WAIT, so they need no choices for it.
        slot = masks.slot[:, LifecycleOp.WAIT + 1 :].any(axis=1)
        germinates = masks.slot[:, LifecycleOp.GERMINATE]
        blueprint = (masks.blueprint & germinates[:, :, None]).any(axis=1)
        blend = masks.blend & masks.op[:, LifecycleOp.GERMINATE, None]
        heads = [slot, blueprint, blend, masks.op]
        for head in heads:
            # A head that does not matter has one choice: no entropy, nothing to learn.
            head[:, 0] |= ~head.any(axis=1)
        return np.concatenate(heads, axis=1)

    def rows(self, actions: np.ndarray) -> np.ndarray:
        return _checked(self.space, actions)


class FlatActions:
    """Number 0 is WAIT; `table` [n, 4] has the row of every number."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        slots, blueprints, blends, _ = sizes
        op = LifecycleOp
        rows = [(0, 0, 0, int(op.WAIT))]
        rows += [
            (*choice, int(op.GERMINATE))
            for choice in product(range(slots), range(blueprints), range(blends))
        ]
        rows += [(slot, 0, 0, int(o)) for o, slot in product((op.CULL, op.FOSSILIZE), range(slots))]
        self.table = np.array(rows, dtype=np.int64)
        self.space: spaces.Space[Any] = spaces.Discrete(len(rows))

    def mask(self, masks: ActionMasks) -> np.ndarray:
        slot, blueprint, blend, op = self.table.T
        seed = masks.blueprint[:, slot, blueprint] & masks.blend[:, blend]
        return np.asarray(
            masks.op[:, op] & masks.slot[:, op, slot] & (seed | (op != LifecycleOp.GERMINATE))
        )

    def rows(self, actions: np.ndarray) -> np.ndarray:
        return self.table[_checked(self.space, actions)]


def _checked(space: spaces.Space[Any], actions: np.ndarray) -> np.ndarray:
    found = np.asarray(actions)
    for action in found:
        if not space.contains(action):
            raise ConfigError(f"action {shortened(str(action))} is not in {space}")
    return found.astype(np.int64)


ENCODINGS: dict[str, type[FactoredActions | FlatActions]] = {
    "factored": FactoredActions,
    "flat": FlatActions,
}
