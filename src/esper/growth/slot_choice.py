"""From a user's choice of slots, or from none, to the sites of a network."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from esper.growth.folding import Folding
from esper.growth.hooks import original
from esper.growth.layouts import TOPOLOGY_OF_LAYOUT
from esper.growth.sites import (
    UNKNOWN,
    Layouts,
    SlotChoice,
    SlotInfo,
    SlotListing,
    explaining,
    inner,
    inspect_model,
)
from esper.growth.stack_search import find_stacks
from esper.leyline import ConfigError, InjectionSpec, format_slot_id

# The choice that is made for the user, and how many slots it takes.
AUTO, AUTO_SLOTS = "auto", 4


def choose_slots(
    model: nn.Module, slots: SlotChoice, found: SlotListing, *, causal: bool = False
) -> list[InjectionSpec]:
    """The chosen slots in order of use, as r0c0, r0c1, ...

    `slots` is a list of module names or of their last components (`conv2` for every `....conv2`,
    unless a module has exactly that name), one regular expression that matches whole names, a
    predicate `(name, module) -> bool`, or AUTO. Raises ConfigError for a name that cannot be a
    slot.
    """
    if slots == AUTO:
        chosen = _spread(model, found)
    elif isinstance(slots, str):
        try:
            pattern = re.compile(slots)
        except re.error as error:
            raise ConfigError(f"slots={slots!r} is not a regular expression: {error}") from error
        chosen = [slot for slot in found if pattern.fullmatch(slot.name)]
    elif callable(slots):
        with explaining("slots=, a predicate of (name, module), failed"):
            chosen = [slot for slot in found if slots(slot.name, model.get_submodule(slot.name))]
    else:
        modules = dict(model.named_modules())
        usable = {slot.name for slot in found}
        meant = (_meant(model, entry, modules) for entry in slots)
        names = {name for each in meant for name in _usable(each, usable, found)}
        chosen = [slot for slot in found if slot.name in names]
    if not chosen:
        raise ConfigError(
            f"slots={slots!r} matches no slot; esper.list_slots(model, example) lists all slots"
        )
    for slot in chosen:
        rank = len(slot.shape) + 1
        if slot.layout == UNKNOWN:
            fitting = [repr(layout) for layout in TOPOLOGY_OF_LAYOUT if len(layout) == rank]
            raise ConfigError(
                f"module {slot.name!r} ({slot.module}) cannot be a slot yet: it is not known "
                f"which of its {rank} dimensions are batch and channels; give "
                f"layout={{{slot.name!r}: ...}}, one of {', '.join(fitting)}"
            )
    return [_site(slot, i, len(chosen), causal=causal) for i, slot in enumerate(chosen)]


def _spread(model: nn.Module, found: SlotListing) -> list[SlotInfo]:
    """At most AUTO_SLOTS slots along the model: ends of its stages, but not its last one.

    A stage is a module with parameters, with the modules without parameters after it that keep
    the layout. Containers with more than half of the model's parameters are taken apart.
    """
    known = [slot for slot in found if slot.layout != UNKNOWN]
    hidden = [slot for slot in known if slot.name not in found.final] or known
    if not hidden:
        raise ConfigError(
            f"{type(model).__name__} has no module where a seed could grow; "
            "esper.list_slots(model, example) lists all slots and the layouts that are missing"
        )
    half = sum(p.numel() for p in model.parameters()) / 2
    names = {parent for slot in hidden for parent in _parents(slot.name)}
    outer = [
        slot
        for slot in hidden
        if slot.name not in names
        or slot.params <= half
        or not _is_container(model.get_submodule(slot.name))
    ]
    taken = {slot.name for slot in outer}
    outer = [s for s in outer if not any(p in taken for p in _parents(s.name))]
    stages: list[list[SlotInfo]] = []
    for slot in outer:
        if slot.params or not stages or stages[-1][-1].layout != slot.layout:
            stages.append([])
        stages[-1].append(slot)
    ends = [stage[-1] for stage in stages if any(slot.params for slot in stage)] or hidden
    count = min(len(ends), AUTO_SLOTS)
    return [ends[(i + 1) * len(ends) // count - 1] for i in range(count)]


def _is_container(module: nn.Module) -> bool:
    own = not type(module).__module__.startswith("torch.nn.modules")
    return own or isinstance(module, (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder))


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _site(slot: SlotInfo, index: int, count: int, *, causal: bool) -> InjectionSpec:
    # Seeds for a length (cnn1d) use both neighbours; those for sequences can be causal.
    topology = "transformer" if causal and slot.topology == "cnn1d" else slot.topology
    widening = slot.widening
    # The valve of a gated blend averages the input of a convolution over all positions.
    if causal and widening is not None and widening.first.kind != "Linear":
        widening = None
    spec = InjectionSpec(
        slot_id=format_slot_id(0, index),
        channels=slot.shape[slot.layout.replace("B", "").index("C")],
        position=(index + 1) / count,
        module=slot.name,
        topology=topology,
        shape=slot.shape,
        calls=slot.calls,
        layout=slot.layout,
        causal=causal,
        widening=widening,
        macs=slot.macs,
    )
    if not spec.reading:
        return spec
    sizes = dict(zip(slot.layout.replace("B", ""), slot.shape, strict=True))
    letters = [slot.layout[i] for i in spec.reading if slot.layout[i] != "B"]
    return replace(spec, shape=tuple(sizes[letter] for letter in letters))


def _meant(model: nn.Module, entry: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The module with that name, else all whose names end with it."""
    if not isinstance(entry, str):
        raise ConfigError(f"slots must be names of modules, got {entry!r}")
    meant = [entry] if entry in modules else [n for n in modules if n.endswith(f".{entry}")]
    if not meant:
        raise ConfigError(
            f"{type(model).__name__} has no module {entry!r}; "
            "esper.list_slots(model, example) lists the modules where it can grow"
        )
    return meant


def _usable(meant: list[str], slots: set[str], found: SlotListing) -> set[str]:
    usable = slots.intersection(meant)
    if not usable and meant[0] in found.refused:
        raise ConfigError(f"{meant[0]!r} cannot be a slot: {found.refused[meant[0]]}")
    if not usable:
        raise ConfigError(
            f"module {meant[0]!r} cannot be a slot: its output must be (or contain, as its first "
            "or only one) a float tensor of 2 to 5 dimensions, including the batch of the model's "
            "input, with the same shape at every call; packed sequences and GraphModules cannot"
        )
    return usable


def list_slots(model: nn.Module, example: Any, layout: Layouts | None = None) -> SlotListing:
    """Every module of `model` where a seed could grow, and its stacks of blocks; it prints as a
    table.

    `layout` gives the layouts of outputs by module name, where the table has a "?".
    """
    plain = original(inner(model))
    slots, folding = inspect_model(plain, example, layout).slots, Folding(plain)
    slots[:] = [
        replace(slot, second_path=folding.obstacle(slot.widening)) if slot.widening else slot
        for slot in slots
    ]
    slots.stacks = find_stacks(plain, example)
    return slots
