"""Two ways to say an action, and the masks of each.

A decision is a row (slot, blueprint, blend, op). Which slots are legal depends on the op, which
blueprints on the slot.

factored   one number for each head: a MultiDiscrete. A mask has a part for each head, and a part
           cannot know what another head will say. So it allows what occurs in some legal decision,
           and a combination that is illegal all the same becomes WAIT.
flat       every combination that could ever be legal is one number: a Discrete with an exact mask.
"""

from itertools import product
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from esper.leyline import BLUEPRINT, OP, SLOT, ActionMasks, ConfigError, LifecycleOp, shortened


class Choices(Protocol):
    """`space` is that of one environment."""

    space: spaces.Space[Any]

    def mask(self, masks: ActionMasks) -> np.ndarray:
        """bool[E, n], a row for each environment; at least one choice of each kind is legal."""
        ...

    def rows(self, actions: np.ndarray) -> np.ndarray:
        """int64 [E, 4] in the order of HEAD_NAMES, from one action of `space` for each of E. Raises
        ConfigError for what is not in `space`."""
        ...


class FactoredChoices:
    """`sizes` are the numbers of slots, blueprints, blends and ops."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.space: spaces.Space[Any] = spaces.MultiDiscrete(list(sizes))

    def mask(self, masks: ActionMasks) -> np.ndarray:
        # Where WAIT is drawn the other heads say nothing, so they need no choices for it.
        slot = masks.slot[:, LifecycleOp.WAIT + 1 :].any(axis=1)
        germinates = masks.slot[:, LifecycleOp.GERMINATE]
        blueprint = (masks.blueprint & germinates[:, :, None]).any(axis=1)
        blend = masks.blend & masks.op[:, LifecycleOp.GERMINATE, None]
        parts = [slot, blueprint, blend, masks.op]
        for part in parts:
            # A head that nothing makes relevant has one choice: no entropy, nothing to learn.
            part[:, 0] |= ~part.any(axis=1)
        return np.concatenate(parts, axis=1)

    def rows(self, actions: np.ndarray) -> np.ndarray:
        return _inside(self.space, actions)


class FlatChoices:
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
        return self.table[_inside(self.space, actions)]


def _inside(space: spaces.Space[Any], actions: np.ndarray) -> np.ndarray:
    """The same as int64, if each of them is in `space`."""
    found = np.asarray(actions)
    for action in found:
        if not space.contains(action):
            raise ConfigError(f"action {shortened(str(action))} is not in {space}")
    return found.astype(np.int64)


def make_choices(kind: str, sizes: tuple[int, ...]) -> Choices:
    """Raises ConfigError for a kind that there is not."""
    if kind == "factored":
        return FactoredChoices(sizes)
    if kind == "flat":
        return FlatChoices(sizes)
    raise ConfigError(f"actions are factored or flat, got {kind!r}")


def in_words(row: np.ndarray, slots: tuple[str, ...], blueprints: tuple[str, ...]) -> str:
    """A decision as a reader would say it: `GERMINATE conv3x3 in blocks.0`."""
    op = LifecycleOp(int(row[OP]))
    if op == LifecycleOp.WAIT:
        return op.name
    what = f" {blueprints[row[BLUEPRINT]]}" if op == LifecycleOp.GERMINATE else ""
    return f"{op.name}{what} in {slots[row[SLOT]]}"
