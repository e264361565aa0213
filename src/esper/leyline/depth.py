"""Growth in depth: what users ask for, and the plan that follows from it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from esper.leyline.errors import ConfigError

Birth = Literal["copy", "fresh"]
Spread = Literal["spread", "end"]
AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True)
class Depth:
    """Grow a model by blocks of its own: more entries in an `nn.ModuleList` or `nn.Sequential`.

    path         the list of blocks, several lists, or "auto" if the model has exactly one;
                 `esper.list_slots` shows them
    start        the model is built with all its blocks, and training starts with so many of them
                 (in each list); default: 1
    add          the model is deepened by so many blocks beyond those that it has; give this or
                 `start`
    birth        copy: a new block starts as a copy of the block before it; fresh: with new weights.
                 Either way the model's output does not change at first
    when         "auto": the number of blocks doubles whenever the loss curve says that it pays; or
                 the share of the run after which all blocks come; or a list of shares
    places       spread: new blocks come between the present ones; end: behind them
    freeze_host  only new blocks learn, and the first of them come at once; needs `add`

    Raises ConfigError for values that cannot work.
    """

    path: str | Sequence[str] = AUTO
    start: int | None = None
    add: int | None = None
    birth: Birth = "copy"
    when: Literal["auto"] | float | Sequence[float] = AUTO
    places: Spread = "spread"
    freeze_host: bool = False

    def __post_init__(self) -> None:
        listed = isinstance(self.path, Sequence)
        names = (self.path,) if isinstance(self.path, str) else tuple(self.path if listed else ())
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"path of Depth must name lists of blocks, got {self.path!r}")
        if self.start is not None and self.add is not None:
            raise ConfigError("give Depth either start or add, not both")
        for name in ("start", "add"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} of Depth must be a whole number from 1, got {value!r}")
        for name, known in (("birth", get_args(Birth)), ("places", get_args(Spread))):
            if getattr(self, name) not in known:
                given = getattr(self, name)
                raise ConfigError(f"{name} of Depth must be {' or '.join(known)}, got {given!r}")
        shares = self.shares
        if shares is not None:
            right = all(isinstance(s, Real) and 0.0 <= s < 1.0 for s in shares)
            if not shares or not right or sorted(shares) != list(shares):
                raise ConfigError(
                    "when of Depth must be 'auto', a share of the run from 0 to below 1, or a list "
                    f"of them in order, got {self.when!r}"
                )
        if self.freeze_host and self.add is None:
            raise ConfigError(
                "freeze_host of Depth trains new blocks of a trained model only; give add=..., or "
                "leave it out"
            )
        if self.freeze_host and shares is not None and shares[0] > 0.0:
            raise ConfigError(
                "with freeze_host of Depth nothing is trained before the first new blocks come; "
                f"begin `when` with 0, got {self.when!r}"
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """Empty for "auto"."""
        if self.path == AUTO:
            return ()
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The shares of the run after which the network grows; None for "auto"."""
        if isinstance(self.when, str):
            return None if self.when == AUTO else ()
        given = self.when if isinstance(self.when, Iterable) else (self.when,)
        return tuple(given)


@dataclass(frozen=True)
class BlockGroup:
    """New blocks that come together.

    depths  of each stack, how many blocks it has before and after, if the groups come in order
    silent  the output does not change when they come; else they have to be blended in
    params, macs  of all these blocks; multiply-adds are per example
    """

    depths: tuple[tuple[str, int, int], ...]
    silent: bool
    params: int
    macs: int

    @property
    def name(self) -> str:
        """One word, as scripts of actions need it."""
        return "+".join(f"{path}:{before}-{after}" for path, before, after in self.depths)

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "BlockGroup":
        return BlockGroup(**{**tree, "depths": tuple(tuple(each) for each in tree["depths"])})


@dataclass(frozen=True)
class StackPlan:
    """How one list of blocks grows. Every block has a place in the full stack, from 0.

    path, size   name of the list, and the number of blocks of the full stack
    first        places of the blocks of the network before it grows
    groups       places of the blocks of each growth event
    like         for each place the block of the given model whose entries in lists of the config
                 it has
    source       for each place the place of a first block with the same parameters, -1 if none has;
                 blocks that come are copied from it, then get the values of the block before them
    silent       for each place the parameters that are 0 at birth; None where nothing silences the
                 block, and for first blocks
    adding       the model adds the output of each block to its input itself
    numbers      (submodule, attribute) of blocks that hold the block's index in the list
    """

    path: str
    size: int
    first: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    like: tuple[int, ...]
    source: tuple[int, ...]
    silent: tuple[tuple[str, ...] | None, ...]
    adding: bool
    numbers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class DepthPlan:
    """How the stacks of a model grow. `added`: the full stacks have more blocks than the model that
    was given; else that one has them all."""

    stacks: tuple[StackPlan, ...]
    added: bool
    birth: Birth
    freeze_host: bool

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "DepthPlan":
        """The inverse of `dataclasses.asdict`."""
        stacks = tuple(
            StackPlan(**{name: _tuples(value) for name, value in each.items()})
            for each in tree["stacks"]
        )
        return DepthPlan(**{**tree, "stacks": stacks})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def depths(first: int, last: int, events: int) -> list[int]:
    """The number of blocks before the first of `events` growth events and after each of them, in
    equal ratios."""
    return [round(first * (last / first) ** (event / events)) for event in range(events + 1)]


def doublings(first: int, last: int) -> int:
    """How often a stack doubles, the last time perhaps not whole."""
    return max(0, math.ceil(math.log2(last / first)))


def doubled(first: int, last: int, events: int) -> list[int]:
    """As `depths`, by doubling; what is done before the last event stays as it is."""
    return [min(last, first * 2**event) for event in range(events + 1)]


def next_places(present: Iterable[int], size: int, count: int, spread: Spread) -> tuple[int, ...]:
    """Places of `count` more blocks: behind the last one, or always in the middle of the longest
    gap, so that each present block is followed by about as many new ones."""
    taken, found = sorted(present), list[int]()
    for _ in range(count):
        if spread == "end":
            place = next(p for p in range(taken[0], size) if p not in taken)
        else:
            ends = zip(taken, [*taken[1:], size], strict=True)
            length, start = max((b - a, -a) for a, b in ends)
            place = length // 2 - start
        found.append(place)
        taken = sorted([*taken, place])
    return tuple(sorted(found))
