"""Where any model can grow: find, choose and describe slots by running the model once.

Nothing is traced and nothing is rewritten: forward hooks watch one pass over an example.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from esper.growth.blueprints.catalogue import OutputSpec
from esper.growth.counting import flop_counter
from esper.growth.dataflow import DataflowTracer
from esper.growth.layouts import (
    TOPOLOGY_OF_LAYOUT,
    CausalWatch,
    Dims,
    DimsTracker,
    dims_of_output,
    layout_of,
)
from esper.growth.outputs import locate_in_output, locate_in_slot
from esper.leyline import ConfigError, InjectionSpec, Widening, format_slot_id

SlotChoice = Sequence[str] | str | Callable[[str, nn.Module], bool]
Layouts = Mapping[str, str]
_UNCLEAR = "?"


@dataclass(frozen=True)
class SlotInfo:
    """A module whose output a seed could extend. `macs` is its own cost for one example.

    `layout` has a letter for each dimension of the output (B batch, C channels, T tokens or time,
    L length, D H W) and is "?" where neither the module nor what feeds it says; then it must be
    given before a seed can grow there. `shape` is without the batch, in the order of the layout.
    `widening` is the hidden layer that a bypass can make wider.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    layout: str
    topology: str
    params: int
    macs: int
    calls: int
    widening: Widening | None = None


class SlotListing(list[SlotInfo]):
    """A list of SlotInfo that prints as a table."""

    def __repr__(self) -> str:
        head = ("name", "module", "shape", "layout", "fits", "params", "multiply-adds", "calls")
        rows = [
            (s.name, s.module, "x".join(map(str, s.shape)), s.layout, s.topology, *numbers)
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
    """What one pass over an example showed. Multiply-adds are per example.

    `causal` is True for a model that says so itself: by an attribute `causal`, or by calling a
    layer or attention of torch with `is_causal=True`.
    """

    slots: SlotListing
    output: OutputSpec | None
    macs: int
    causal: bool


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


@dataclass
class _Watch:
    """What hooks on every module saw in one pass: outputs, how they are laid out, causality."""

    tracker: DimsTracker
    dataflow: DataflowTracer
    seen: dict[nn.Module, list[tuple[Tensor, Dims]]] = field(default_factory=dict)
    causal: bool = False

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.causal |= kwargs.get("is_causal") is True
        self.dataflow.passed(module, args, output)
        location = locate_in_slot(output)
        if location is not None:
            features = location.get(output)
            read = args[0] if args else next(iter(kwargs.values()), None)
            dims = dims_of_output(module, read, features, self.tracker)
            self.tracker[features] = dims
            self.seen.setdefault(module, []).append((features, dims))


def probe(model: nn.Module, example: Any, layout: Layouts | None = None) -> Probe:
    """Run the model once on `example` and describe every possible slot, in order of use.

    `layout` says for modules by name what they do not say themselves. Raises ConfigError if the
    model cannot run on the example, and for a layout that cannot be.
    """
    batch = batch_size(example)
    tracker, dataflow, attention = DimsTracker(), DataflowTracer(), CausalWatch()
    watch = _Watch(tracker, dataflow)
    for tensor in tensors_in(example):
        if tensor.dim() > 0 and len(tensor) == batch:
            tracker[tensor] = Dims(batch=0)
        dataflow.begin(tensor)
    handles = [
        module.register_forward_hook(watch, with_kwargs=True)
        for name, module in model.named_modules()
        if name
    ]
    counter = flop_counter()
    try:
        with evaluating(model), counter, tracker, dataflow, attention:
            output = call_model(model, example)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{type(model).__name__} does not run on the example given ({error}); "
            "give one input as the training loader yields it"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    given = _check_layouts(model, layout or {}, watch.seen)
    flops = counter.get_flop_counts()
    listing = SlotListing()
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        found = _slot_layout(watch.seen.get(module, []), given.get(name), batch, name)
        # A copy of a GraphModule loses its hooks.
        if found is None or isinstance(module, fx.GraphModule):
            continue
        macs = sum(flops.get(f"{type(model).__name__}.{name}", {}).values()) // 2 // batch
        slot = _slot_info(name, module, found, watch.seen[module], macs)
        listing.append(replace(slot, widening=dataflow.widening(module, names, batch)))
    order = {module: i for i, module in enumerate(watch.seen)}
    listing.sort(key=lambda slot: order[model.get_submodule(slot.name)])
    return Probe(
        listing,
        None if isinstance(model, fx.GraphModule) else _output_spec(output, batch, tracker),
        counter.get_total_flops() // 2 // batch,
        watch.causal or attention.seen or getattr(model, "causal", None) is True,
    )


def _slot_info(
    name: str, module: nn.Module, layout: str, outputs: list[tuple[Tensor, Dims]], macs: int
) -> SlotInfo:
    shape = list(outputs[0][0].shape)
    del shape[layout.index("B") if layout != _UNCLEAR else 0]
    return SlotInfo(
        name=name,
        module=type(module).__name__,
        shape=tuple(shape),
        layout=layout,
        topology=TOPOLOGY_OF_LAYOUT.get(layout, _UNCLEAR),
        params=sum(p.numel() for p in module.parameters()),
        macs=macs,
        calls=len(outputs),
    )


def _check_layouts(
    model: nn.Module, layout: Layouts, seen: Mapping[nn.Module, list[tuple[Tensor, Dims]]]
) -> Layouts:
    modules = dict(model.named_modules())
    for name, letters in layout.items():
        if letters not in TOPOLOGY_OF_LAYOUT:
            raise ConfigError(
                f"layout {letters!r} of {name!r} must be one of {', '.join(TOPOLOGY_OF_LAYOUT)}"
            )
        if name not in modules or modules[name] not in seen:
            raise ConfigError(
                f"layout names {name!r}, which is no module of {type(model).__name__} that gives "
                "a float tensor; esper.list_slots(model, example) shows those that do"
            )
        rank = seen[modules[name]][0][0].dim()
        if rank != len(letters):
            raise ConfigError(
                f"layout {letters!r} of {name!r} has {len(letters)} dimensions, "
                f"its output has {rank}"
            )
    return layout


def _slot_layout(
    outputs: list[tuple[Tensor, Dims]], given: str | None, batch: int, name: str
) -> str | None:
    """The layout of a module's outputs, "?" if it is not clear, None if it cannot be a slot."""
    if not outputs or len({output.shape for output, _ in outputs}) != 1:
        return None
    shape, rank = outputs[0][0].shape, outputs[0][0].dim()
    if given is not None:
        if shape[given.index("B")] != batch:
            raise ConfigError(
                f"layout {given!r} of {name!r} has a batch of {shape[given.index('B')]}, the "
                f"example has {batch}: the first dimension of a model's input is the batch"
            )
        return given
    found = {layout_of(dims, rank) for _, dims in outputs}
    if rank == 2 and all(dims.batch in (None, 0) for _, dims in outputs):
        found = {"BC"}
    layout = found.pop() if len(found) == 1 else None
    if layout is not None:
        return layout if shape[layout.index("B")] == batch else None
    return _UNCLEAR if 3 <= rank <= 5 and batch in shape[:2] else None


def _output_spec(output: Any, batch: int, tracker: DimsTracker) -> OutputSpec | None:
    location = locate_in_output(output)
    if location is None:
        return None
    answer = location.get(output)
    if len(answer) != batch or tracker[answer].batch not in (None, 0):
        return None
    if answer.dim() == 2:
        return OutputSpec(answer.shape[1], per_position=False)
    if layout_of(tracker[answer], answer.dim()) == "BTC":
        return OutputSpec(answer.shape[2], per_position=True, positions=answer.shape[1])
    return None


def list_slots(model: nn.Module, example: Any, layout: Layouts | None = None) -> SlotListing:
    """Every module of `model` where a seed could grow; print it to read it as a table.

    `layout` says of modules by name how their outputs are laid out, where the table has a "?".
    """
    return probe(model, example, layout).slots


def choose_slots(
    model: nn.Module, slots: SlotChoice, found: SlotListing, *, causal: bool = False
) -> list[InjectionSpec]:
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
    unclear = [slot for slot in chosen if slot.layout == _UNCLEAR]
    if unclear:
        raise ConfigError(_say_unclear(unclear[0]))
    return [_site(slot, i, len(chosen), causal=causal) for i, slot in enumerate(chosen)]


def _say_unclear(slot: SlotInfo) -> str:
    fitting = [layout for layout in TOPOLOGY_OF_LAYOUT if len(layout) == len(slot.shape) + 1]
    return (
        f"module {slot.name!r} ({slot.module}) cannot be a slot yet: neither it nor what feeds it "
        f"says which of its {len(slot.shape) + 1} dimensions are batch and channels, or they "
        f"disagree; say so with layout={{{slot.name!r}: ...}}, one of "
        f"{', '.join(repr(layout) for layout in fitting)}"
    )


def _site(slot: SlotInfo, index: int, count: int, *, causal: bool) -> InjectionSpec:
    # Seeds along a length look to both sides; those for sequences can be told not to.
    topology = "transformer" if causal and slot.topology == "cnn1d" else slot.topology
    spec = InjectionSpec(
        slot_id=format_slot_id(0, index),
        channels=slot.shape[slot.layout.replace("B", "").index("C")],
        position=(index + 1) / count,
        layer_range=(index, index + 1),
        module=slot.name,
        topology=topology,
        shape=slot.shape,
        calls=slot.calls,
        layout=slot.layout,
        causal=causal,
        widening=None if causal and _looks_around(slot.widening) else slot.widening,
        macs=slot.macs,
    )
    if not spec.reading:
        return spec
    sizes = dict(zip(slot.layout.replace("B", ""), slot.shape, strict=True))
    letters = [slot.layout[i] for i in spec.reading if slot.layout[i] != "B"]
    return replace(spec, shape=tuple(sizes[letter] for letter in letters))


def _looks_around(widening: Widening | None) -> bool:
    """Convolutions as the host's would be causal, the valve of a gated blend, which reads their
    mean over all positions, would not."""
    return widening is not None and widening.first.kind != "Linear"


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
            f"module {meant[0]!r} cannot be a slot: its output must be (or hold, as its first or "
            "only one) a float tensor of 2 to 5 dimensions, one of them the batch of the model's "
            "input, of one shape at every call; nor can it be packed or the module a GraphModule"
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {name: map_tensors(function, entry) for name, entry in vars(value).items()}
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
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))
