"""Where a host can grow: slot ids, the description of one slot, and the list of all slots."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from esper.leyline.depth import BlockGroup
from esper.leyline.errors import ConfigError

# How the seeds of each topology read features: B batch, C channels, T tokens or time, L length,
# D H W.
SEED_LAYOUTS = {
    "cnn": "BCHW",
    "transformer": "BTC",
    "mlp": "BC",
    "cnn1d": "BCL",
    "cnn3d": "BCDHW",
}


def format_slot_id(row: int, col: int) -> str:
    """r{row}c{col}; the order by row, then column, is the order of action indices."""
    return f"r{row}c{col}"


# A module and its settings, as in ("Flatten", 1, 3).
Step = tuple[Any, ...]


@dataclass(frozen=True)
class LayerSpec:
    """A layer of the host: `kind` is Linear, Conv1d, Conv2d or Conv3d, `module` its dotted name,
    `settings` are further keyword arguments of a convolution."""

    module: str
    kind: str
    inputs: int
    outputs: int
    bias: bool
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Widening:
    """A hidden layer that a bypass can widen, and the layer that reads its output.

    A bypass reads the input of `first` and adds to the output of `second`.

    steps         what the host does in between
    reads, adds   shapes of that input and that output on an example of `batch`
    wider         modules whose outputs become wider with `first`, by name, in order
    obstacle      what the host does with them that another path cannot share; "" if nothing
    """

    first: LayerSpec
    second: LayerSpec
    steps: tuple[Step, ...]
    reads: tuple[int, ...]
    adds: tuple[int, ...]
    batch: int
    wider: tuple[str, ...]
    obstacle: str

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "Widening":
        """The inverse of `dataclasses.asdict`."""
        layers = {name: LayerSpec(**tree[name]) for name in ("first", "second")}
        return Widening(**{**tree, **layers})


@dataclass(frozen=True)
class InjectionSpec:
    """One slot: a module of the host whose output a seed can extend.

    position     0 at the input, 1 at the output
    module       dotted name of the host module
    topology     which seeds fit; they read features as in SEED_LAYOUTS
    shape        of the features as seeds read them, without the batch dimension
    calls        how often one pass through the host calls the module
    layout       the host's layout of the features, if it is not that of the seeds
    causal       the host does not look ahead along its positions, so seeds must not
    widening     the hidden layer in the module that a bypass can widen
    macs         multiply-adds of the module itself per example, None if unknown
    blocks       what grows here in depth: the module is a list of blocks, and holds them
    """

    slot_id: str
    channels: int
    position: float
    module: str
    topology: str
    shape: tuple[int, ...]
    calls: int = 1
    layout: str = ""
    causal: bool = False
    widening: Widening | None = None
    macs: int | None = None
    blocks: BlockGroup | None = None

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "InjectionSpec":
        """The inverse of `dataclasses.asdict`."""
        nested: dict[str, Any] = {}
        for name, kind in (("widening", Widening), ("blocks", BlockGroup)):
            own = tree.get(name)
            nested[name] = None if own is None else kind.from_tree(own)
        return InjectionSpec(**{**tree, **nested})

    @property
    def name(self) -> str:
        """What users know the slot by."""
        return self.module if self.blocks is None else self.blocks.name

    @property
    def reading(self) -> tuple[int, ...]:
        """The permutation from the host's layout to the seed's; empty if they are the same."""
        seed = SEED_LAYOUTS[self.topology]
        if self.layout in ("", seed):
            return ()
        letters = self.layout.replace("L", "T") if "T" in seed else self.layout
        return tuple(letters.index(letter) for letter in seed)

    @property
    def writing(self) -> tuple[int, ...]:
        """The permutation back from the seed's layout to the host's."""
        return tuple(self.reading.index(i) for i in range(len(self.reading)))


@dataclass(frozen=True)
class SlotConfig:
    """The slots of a host; their order is that of the slot head.

    `modules` are the names that users know the slots by, the ids if not given.
    """

    slot_ids: tuple[str, ...]
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.slot_ids:
            raise ConfigError("at least one slot is needed, got none")
        for slot_id in self.slot_ids:
            if not re.fullmatch(r"r\d+c\d+", slot_id):
                raise ConfigError(f"slot {slot_id!r} is not of the form r<row>c<col>, like r0c1")
        if len(set(self.slot_ids)) != len(self.slot_ids):
            raise ConfigError(f"slot ids must be distinct, got {list(self.slot_ids)}")
        if self.modules and len(self.modules) != len(self.slot_ids):
            raise ConfigError(
                f"{len(self.slot_ids)} slots need as many modules, got {len(self.modules)}"
            )

    @property
    def num_slots(self) -> int:
        return len(self.slot_ids)

    @property
    def names(self) -> tuple[str, ...]:
        return self.modules or self.slot_ids

    def index_for_name(self, name: str) -> int:
        """The index of a module name or slot id; raises ConfigError if there is none."""
        for names in (self.modules, self.slot_ids):
            if name in names:
                return names.index(name)
        known = ", ".join(
            f"{module} ({slot_id})" if self.modules else slot_id
            for module, slot_id in zip(self.names, self.slot_ids, strict=True)
        )
        raise ConfigError(f"no slot {name!r}; there are {known}")

    @staticmethod
    @cache
    def default() -> "SlotConfig":
        """Three slots in a row; always the same object."""
        return SlotConfig.for_grid(1, 3)

    @staticmethod
    def from_specs(specs: Iterable[InjectionSpec]) -> "SlotConfig":
        ordered = sorted(specs, key=lambda spec: spec.position)
        return SlotConfig(
            tuple(spec.slot_id for spec in ordered), tuple(spec.name for spec in ordered)
        )

    @staticmethod
    def for_grid(rows: int, cols: int) -> "SlotConfig":
        return SlotConfig(
            tuple(format_slot_id(row, col) for row in range(rows) for col in range(cols))
        )
