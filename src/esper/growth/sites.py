"""Where a model can grow: find, choose and describe slots with one forward pass on an example.

The model is not rewritten: forward hooks record the pass.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from esper.growth.blueprints.catalogue import OutputSpec, flop_counter
from esper.growth.compiled import original, without_graphs
from esper.growth.dataflow import DataflowTracer
from esper.growth.devices import input_device, on_device
from esper.growth.layouts import (
    TOPOLOGY_OF_LAYOUT,
    CausalAttentionDetector,
    Dims,
    DimsTracker,
    dims_of_output,
    layout_of,
)
from esper.growth.nested import tensors_in
from esper.growth.outputs import locate_in_output, locate_in_slot
from esper.leyline import ConfigError, InjectionSpec, Widening, format_slot_id

SlotChoice = Sequence[str] | str | Callable[[str, nn.Module], bool]
Layouts = Mapping[str, str]
# The outputs of a module's calls.
Outputs = list[tuple[Tensor, Dims]]
_UNKNOWN = "?"


@dataclass(frozen=True)
class SlotInfo:
    """A module whose output a seed could extend. `macs` is its own cost for one example.

    `layout` has a letter for each dimension of the output (B batch, C channels, T tokens or time,
    L length, D H W). It is "?" if unknown; then the user must give it before a seed can grow there.
    `shape` is without the batch, in the order of the layout. `widening` is the hidden layer that a
    bypass can widen.
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
class ModelInspection:
    """What one pass on an example showed. Multiply-adds are per example.

    `causal` is True if the model has an attribute `causal=True`, or calls a layer or attention of
    torch with `is_causal=True`.
    """

    slots: SlotListing
    output: OutputSpec | None
    macs: int
    causal: bool


@dataclass(frozen=True)
class CallInput:
    """An input together with the user's own function that calls a model with it."""

    forward: Callable[[nn.Module, Any], Any]
    value: Any


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a loader's input: a dict as keyword, a tuple or list as positional
    arguments."""
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
    raise ConfigError("the example has no tensor; give one input as the training loader yields it")


@dataclass
class _ForwardRecorder:
    """A forward hook for all modules that records their outputs, layouts and causality."""

    tracker: DimsTracker
    dataflow: DataflowTracer
    outputs: dict[nn.Module, Outputs] = field(default_factory=dict)
    causal: bool = False

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.causal |= kwargs.get("is_causal") is True
        self.dataflow.record_call(module, args, output)
        location = locate_in_slot(output)
        if location is not None:
            features = location.get(output)
            read = args[0] if args else next(iter(kwargs.values()), None)
            dims = dims_of_output(module, read, features, self.tracker)
            self.tracker[features] = dims
            self.outputs.setdefault(module, []).append((features, dims))


def inspect_model(model: nn.Module, example: Any, layout: Layouts | None = None) -> ModelInspection:
    """Run the model once on `example` and describe every possible slot, in order of use. The
    example may be on the CPU.

    `layout` gives layouts by module name where they are unknown. Raises ConfigError if the model
    cannot run on the example, and for an impossible layout.
    """
    batch, example = batch_size(example), on_device(example, input_device(model))
    tracker, dataflow, attention = DimsTracker(), DataflowTracer(), CausalAttentionDetector()
    recorder = _ForwardRecorder(tracker, dataflow)
    for tensor in tensors_in(example):
        if tensor.dim() > 0 and len(tensor) == batch:
            tracker[tensor] = Dims(batch=0)
        dataflow.add_input(tensor)
    handles = [
        module.register_forward_hook(recorder, with_kwargs=True)
        for name, module in model.named_modules()
        if name
    ]
    counter = flop_counter()
    try:
        with evaluating(model), without_graphs(), counter, tracker, dataflow, attention:
            output = call_model(model, example)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{type(model).__name__} does not run on the example ({error}); "
            "give one input as the training loader yields it"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    outputs = recorder.outputs
    given = _check_layouts(model, layout or {}, outputs)
    flops = counter.get_flop_counts()
    listing = SlotListing()
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        found = _slot_layout(outputs.get(module, []), given.get(name), batch, name)
        # A copy of a GraphModule loses its hooks.
        if found is None or isinstance(module, fx.GraphModule):
            continue
        macs = sum(flops.get(f"{type(model).__name__}.{name}", {}).values()) // 2 // batch
        shape = list(outputs[module][0][0].shape)
        del shape[found.index("B") if found != _UNKNOWN else 0]
        listing.append(
            SlotInfo(
                name=name,
                module=type(module).__name__,
                shape=tuple(shape),
                layout=found,
                topology=TOPOLOGY_OF_LAYOUT.get(found, _UNKNOWN),
                params=sum(p.numel() for p in module.parameters()),
                macs=macs,
                calls=len(outputs[module]),
                widening=dataflow.find_widening(module, names, batch),
            )
        )
    order = {module: i for i, module in enumerate(outputs)}
    listing.sort(key=lambda slot: order[model.get_submodule(slot.name)])
    return ModelInspection(
        listing,
        None if isinstance(model, fx.GraphModule) else _output_spec(output, batch, tracker),
        counter.get_total_flops() // 2 // batch,
        recorder.causal or attention.found or getattr(model, "causal", None) is True,
    )


def _check_layouts(
    model: nn.Module, layout: Layouts, outputs: Mapping[nn.Module, Outputs]
) -> Layouts:
    modules = dict(model.named_modules())
    for name, letters in layout.items():
        if letters not in TOPOLOGY_OF_LAYOUT:
            raise ConfigError(
                f"layout {letters!r} of {name!r} must be one of {', '.join(TOPOLOGY_OF_LAYOUT)}"
            )
        if name not in modules or modules[name] not in outputs:
            raise ConfigError(
                f"layout names {name!r}, which is not a module of {type(model).__name__} with a "
                "float tensor as output; esper.list_slots(model, example) lists those modules"
            )
        rank = outputs[modules[name]][0][0].dim()
        if rank != len(letters):
            raise ConfigError(
                f"layout {letters!r} of {name!r} has {len(letters)} dimensions, "
                f"its output has {rank}"
            )
    return layout


def _slot_layout(outputs: Outputs, given: str | None, batch: int, name: str) -> str | None:
    """The layout of a module's outputs, "?" if unknown, None if it cannot be a slot."""
    if not outputs or len({output.shape for output, _ in outputs}) != 1:
        return None
    shape, rank = outputs[0][0].shape, outputs[0][0].dim()
    if given is not None:
        if shape[given.index("B")] != batch:
            raise ConfigError(
                f"layout {given!r} of {name!r} has a batch of {shape[given.index('B')]}, but the "
                f"example has {batch} (the first dimension of the model's input)"
            )
        return given
    found = {layout_of(dims, rank) for _, dims in outputs}
    if rank == 2 and all(dims.batch in (None, 0) for _, dims in outputs):
        found = {"BC"}
    layout = found.pop() if len(found) == 1 else None
    if layout is not None:
        return layout if shape[layout.index("B")] == batch else None
    return _UNKNOWN if 3 <= rank <= 5 and batch in shape[:2] else None


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


def inner(model: nn.Module) -> nn.Module:
    """The model inside a DistributedDataParallel module, compiled or not; else `model` itself."""
    parallel = original(model)
    return parallel.module if isinstance(parallel, DistributedDataParallel) else model


def list_slots(model: nn.Module, example: Any, layout: Layouts | None = None) -> SlotListing:
    """Every module of `model` where a seed could grow; it prints as a table.

    `layout` gives the layouts of outputs by module name, where the table has a "?".
    """
    return inspect_model(original(inner(model)), example, layout).slots


def choose_slots(
    model: nn.Module, slots: SlotChoice, found: SlotListing, *, causal: bool = False
) -> list[InjectionSpec]:
    """The chosen slots in order of use, as r0c0, r0c1, ...

    `slots` is a list of module names or of their last components (`conv2` for every `....conv2`,
    unless a module has exactly that name), one regular expression that matches whole names, or a
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
            f"slots={slots!r} matches no slot; esper.list_slots(model, example) lists all slots"
        )
    for slot in chosen:
        rank = len(slot.shape) + 1
        if slot.layout == _UNKNOWN:
            fitting = [repr(layout) for layout in TOPOLOGY_OF_LAYOUT if len(layout) == rank]
            raise ConfigError(
                f"module {slot.name!r} ({slot.module}) cannot be a slot yet: which of its {rank} "
                "dimensions are batch and channels is unknown; give "
                f"layout={{{slot.name!r}: ...}}, one of {', '.join(fitting)}"
            )
    return [_site(slot, i, len(chosen), causal=causal) for i, slot in enumerate(chosen)]


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


def _matching(model: nn.Module, entry: str, found: SlotListing) -> list[str]:
    """The module with that name, else all whose names end with it."""
    if not isinstance(entry, str):
        raise ConfigError(f"slots must be names of modules, got {entry!r}")
    modules = [name for name, _ in model.named_modules()]
    meant = [entry] if entry in modules else [n for n in modules if n.endswith(f".{entry}")]
    if not meant:
        raise ConfigError(
            f"{type(model).__name__} has no module {entry!r}; "
            "esper.list_slots(model, example) lists the modules where it can grow"
        )
    usable = {slot.name for slot in found}.intersection(meant)
    if not usable:
        raise ConfigError(
            f"module {meant[0]!r} cannot be a slot: its output must be (or contain, as its first "
            "or only one) a float tensor of 2 to 5 dimensions, including the batch of the model's "
            "input, with the same shape at every call; packed sequences and GraphModules cannot"
        )
    return sorted(usable)
