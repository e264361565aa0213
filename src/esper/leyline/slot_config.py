"""Where a host can grow: the description of one slot, and the ordered list of all of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from esper.leyline.errors import ConfigError
from esper.leyline.slot_id import format_slot_id, parse_slot_id, validate_slot_ids
from esper.leyline.widening import Widening

# How each topology's seeds read features: B batch, C channels, T tokens or time, L length, D H W.
SEED_LAYOUTS = {
    "cnn": "BCHW",
    "transformer": "BTC",
    "mlp": "BC",
    "cnn1d": "BCL",
    "cnn3d": "BCDHW",
}
TOPOLOGIES = tuple(SEED_LAYOUTS)


@dataclass(frozen=True)
class InjectionSpec:
    """One place in a host where a seed can be grafted onto a module's output.

    module       dotted name of the host module whose output the seed extends
    topology     what seeds it takes, which read features as SEED_LAYOUTS says
    shape        of the features as seeds read them, without the batch dimension
    layout       how the host lays the features out, where that is not as seeds read them
    causal       the host does not look ahead along its positions, and no seed may
    calls        how often one pass through the host uses the module
    position     0 at the input, 1 at the output
    layer_range  the host layers this slot stands for, as (start, end)
    widening     the hidden layer in the module that a bypass makes wider; None if there is none
    macs         multiply-adds of the module itself per example, None if not known
    """

    slot_id: str
    channels: int
    position: float
    layer_range: tuple[int, int]
    module: str
    topology: str
    shape: tuple[int, ...]
    calls: int = 1
    layout: str = ""
    causal: bool = False
    widening: Widening | None = None
    macs: int | None = None

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "InjectionSpec":
        """The inverse of `dataclasses.asdict`."""
        found = tree.get("widening")
        return InjectionSpec(
            **{**tree, "widening": None if found is None else Widening.from_tree(found)}
        )

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

    def __post_init__(self) -> None:
        parse_slot_id(self.slot_id)
        if self.channels <= 0:
            raise ConfigError(f"slot {self.slot_id} must have channels, got {self.channels}")
        if not 0.0 <= self.position <= 1.0:
            raise ConfigError(
                f"position of slot {self.slot_id} must lie in [0, 1], got {self.position}"
            )
        start, end = self.layer_range
        if not 0 <= start <= end:
            raise ConfigError(
                f"layer range of slot {self.slot_id} must be 0 <= start <= end, "
                f"got {self.layer_range}"
            )
        if self.topology not in TOPOLOGIES:
            raise ConfigError(
                f"topology of slot {self.slot_id} must be one of {', '.join(TOPOLOGIES)}, "
                f"got {self.topology!r}"
            )


@dataclass(frozen=True)
class SlotConfig:
    """The slots of a host in canonical order; the order is the meaning of the slot head.

    `modules` are the names that a user knows the slots by: the host's own modules. Without them a
    slot is known by its id.
    """

    slot_ids: tuple[str, ...]
    channels: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        validate_slot_ids(self.slot_ids)
        for what, given in (("channel counts", self.channels), ("modules", self.modules)):
            if given and len(given) != len(self.slot_ids):
                raise ConfigError(
                    f"{len(self.slot_ids)} slots need as many {what}, got {len(given)}"
                )

    @property
    def num_slots(self) -> int:
        return len(self.slot_ids)

    def slot_id_for_index(self, index: int) -> str:
        return self.slot_ids[index]

    @property
    def names(self) -> tuple[str, ...]:
        """What records and pictures call the slots."""
        return self.modules or self.slot_ids

    def index_for_name(self, name: str) -> int:
        """The slot at a module, or with a slot id; raises ConfigError if there is none."""
        if name in self.modules:
            return self.modules.index(name)
        if name in self.slot_ids:
            return self.slot_ids.index(name)
        known = ", ".join(
            f"{module} ({slot_id})" if self.modules else slot_id
            for module, slot_id in zip(self.names, self.slot_ids, strict=True)
        )
        raise ConfigError(f"no slot {name!r}; there are {known}")

    def index_for_slot_id(self, slot_id: str) -> int:
        """Raises ConfigError if there is no such slot."""
        if slot_id not in self.slot_ids:
            raise ConfigError(f"no slot {slot_id!r}; there are {', '.join(self.slot_ids)}")
        return self.slot_ids.index(slot_id)

    def channels_for_slot(self, slot_id: str) -> int:
        """Raises ConfigError if there is no such slot or widths were not given."""
        index = self.index_for_slot_id(slot_id)
        if not self.channels:
            raise ConfigError(f"the width of slot {slot_id} is not known to this SlotConfig")
        return self.channels[index]

    @staticmethod
    @cache
    def default() -> "SlotConfig":
        """Three slots in a row; always the same object."""
        return SlotConfig.for_grid(1, 3)

    @staticmethod
    def from_specs(specs: Iterable[InjectionSpec]) -> "SlotConfig":
        ordered = sorted(specs, key=lambda spec: spec.position)
        return SlotConfig(
            tuple(spec.slot_id for spec in ordered),
            tuple(spec.channels for spec in ordered),
            tuple(spec.module for spec in ordered),
        )

    @staticmethod
    def for_grid(rows: int, cols: int) -> "SlotConfig":
        return SlotConfig(
            tuple(format_slot_id(row, col) for row in range(rows) for col in range(cols))
        )
