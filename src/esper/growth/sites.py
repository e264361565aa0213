"""Where any model can grow: find, choose and describe slots by running the model once.

Nothing is traced and nothing is rewritten: forward hooks watch one pass over an example.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.growth.blueprints import OutputSpec
from esper.leyline import ConfigError, InjectionSpec, format_slot_id

SlotChoice = Sequence[str] | str | Callable[[str, nn.Module], bool]
_TOPOLOGY_OF_DIMS = {2: "mlp", 3: "transformer", 4: "cnn"}


@dataclass(frozen=True)
class SlotInfo:
    """A module whose output a seed could extend. `macs` is its own cost for one example."""

    name: str
    module: str
    shape: tuple[int, ...]
    topology: str
    params: int
    macs: int
    calls: int


class SlotListing(list[SlotInfo]):
    """A list of SlotInfo that prints as a table."""

    def __repr__(self) -> str:
        head = ("name", "module", "shape", "fits", "params", "multiply-adds", "calls")
        rows = [
            (s.name, s.module, "x".join(map(str, s.shape)), s.topology, *numbers)
            for s in self
            for numbers in [(f"{s.params:,}", f"{s.macs:,}", str(s.calls))]
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        )

    __str__ = __repr__


@dataclass(frozen=True)
class Probe:
    """What one pass over an example showed. Multiply-adds are per example."""

    slots: SlotListing
    output: OutputSpec | None
    macs: int


@dataclass(frozen=True)
class CallInput:
    """An input together with the user's own way of giving it to a model."""

    forward: Callable[[nn.Module, Any], Any]
    value: Any


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The convention for a loader's input: a dict is keywords, a tuple or list is positions."""
    if isinstance(inputs, CallInput):
        return inputs.forward(model, inputs.value)
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode is restored afterwards."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def batch_size(inputs: Any) -> int:
    """Length of the first dimension of the first tensor in a model's input."""
    for tensor in tensors_in(inputs):
        if tensor.dim() > 0:
            return len(tensor)
    raise ConfigError("the example holds no tensor; give an input as the training loader yields it")


def features_of(output: Any) -> Tensor | None:
    """The tensor a seed would extend: the output itself, or the first of a tuple."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else None


def probe(model: nn.Module, example: Any) -> Probe:
    """Run the model once on `example` and describe every possible slot, in order of use.

    Raises ConfigError if the model cannot run on the example.
    """
    batch = batch_size(example)
    seen: dict[nn.Module, list[Tensor]] = {}

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        features = features_of(output)
        if features is not None:
            seen.setdefault(module, []).append(features)

    handles = [
        module.register_forward_hook(watch) for name, module in model.named_modules() if name
    ]
    counter = FlopCounterMode(display=False)
    try:
        with evaluating(model), counter:
            output = call_model(model, example)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{type(model).__name__} does not run on the example given ({error}); "
            "give one input as the training loader yields it"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    flops = counter.get_flop_counts()
    listing = SlotListing()
    for name, module in model.named_modules():
        if module not in seen or not _can_grow(seen[module], batch):
            continue
        shape = tuple(seen[module][0].shape[1:])
        listing.append(
            SlotInfo(
                name=name,
                module=type(module).__name__,
                shape=shape,
                topology=_TOPOLOGY_OF_DIMS[len(shape) + 1],
                params=sum(p.numel() for p in module.parameters()),
                macs=sum(flops.get(f"{type(model).__name__}.{name}", {}).values()) // 2 // batch,
                calls=len(seen[module]),
            )
        )
    order = {module: i for i, module in enumerate(seen)}
    listing.sort(key=lambda slot: order[model.get_submodule(slot.name)])
    return Probe(listing, _output_spec(output, batch), counter.get_total_flops() // 2 // batch)


def _can_grow(outputs: list[Tensor], batch: int) -> bool:
    first = outputs[0]
    return (
        first.dim() in _TOPOLOGY_OF_DIMS
        and first.is_floating_point()
        and all(len(output) == batch for output in outputs)
        and len({output.shape[1:] for output in outputs}) == 1
    )


def _output_spec(output: Any, batch: int) -> OutputSpec | None:
    if not isinstance(output, Tensor) or output.dim() not in (2, 3) or len(output) != batch:
        return None
    return OutputSpec(outputs=output.shape[-1], per_position=output.dim() == 3)


def list_slots(model: nn.Module, example: Any) -> SlotListing:
    """Every module of `model` where a seed could grow; print it to read it as a table."""
    return probe(model, example).slots


def choose_slots(model: nn.Module, slots: SlotChoice, found: SlotListing) -> list[InjectionSpec]:
    """The chosen slots in order of use, as r0c0, r0c1, ...

    `slots` is a list of module names or of their last parts (`conv2` for every `....conv2`, unless
    a module is called just that), one regular expression that names must match in full, or a
    predicate `(name, module) -> bool`. Raises ConfigError for a name that cannot be a slot.
    """
    if isinstance(slots, str):
        try:
            pattern = re.compile(slots)
        except re.error as error:
            raise ConfigError(f"slots={slots!r} is not a regular expression: {error}") from error
        chosen = [slot for slot in found if pattern.fullmatch(slot.name)]
    elif callable(slots):
        chosen = [slot for slot in found if slots(slot.name, model.get_submodule(slot.name))]
    else:
        names = {name for entry in slots for name in _matching(model, entry, found)}
        chosen = [slot for slot in found if slot.name in names]
    if not chosen:
        raise ConfigError(
            f"slots={slots!r} chooses no slot; esper.list_slots(model, example) shows what is there"
        )
    return [
        InjectionSpec(
            slot_id=format_slot_id(0, i),
            channels=slot.shape[0] if slot.topology == "cnn" else slot.shape[-1],
            position=(i + 1) / len(chosen),
            layer_range=(i, i + 1),
            module=slot.name,
            topology=slot.topology,
            shape=slot.shape,
            calls=slot.calls,
        )
        for i, slot in enumerate(chosen)
    ]


def _matching(model: nn.Module, entry: str, found: SlotListing) -> list[str]:
    """The slots that an entry of a list means: the module of that name, else all that end so."""
    if not isinstance(entry, str):
        raise ConfigError(f"slots lists names of modules, got {entry!r}")
    modules = [name for name, _ in model.named_modules()]
    meant = [entry] if entry in modules else [n for n in modules if n.endswith(f".{entry}")]
    if not meant:
        raise ConfigError(
            f"{type(model).__name__} has no module {entry!r}; "
            "esper.list_slots(model, example) shows where it can grow"
        )
    usable = {slot.name for slot in found}.intersection(meant)
    if not usable:
        raise ConfigError(
            f"module {meant[0]!r} cannot be a slot: its output must be a float tensor of 2 to 4 "
            "dimensions, batch first, of one shape at every call"
        )
    return sorted(usable)


# --- tensors inside dicts, lists, tuples and dataclasses: what models take and return --------


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with every tensor replaced; anything that holds none stays the same object."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [map_tensors(function, entry) for entry in value]
        # A named tuple takes its fields one by one.
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: map_tensors(function, getattr(value, f.name)) for f in fields(value)}
        return replace(value, **own)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))
