"""Where a model can grow: find, choose and describe slots with one forward pass on an example.

The model is not rewritten: forward hooks record the pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from esper.growth.blueprints.catalogue import OutputSpec, flop_counter
from esper.growth.dataflow import DataflowTracer
from esper.growth.devices import input_device, on_device
from esper.growth.hooks import original, without_graphs
from esper.growth.layouts import (
    TOPOLOGY_OF_LAYOUT,
    CausalAttentionDetector,
    Dims,
    DimsTracker,
    dims_of_output,
    layout_of,
)
from esper.growth.outputs import locate_in_output, locate_in_slot, tensors_in
from esper.leyline import ConfigError, EsperError, Widening

SlotChoice = Sequence[str] | str | Callable[[str, nn.Module], bool]
Layouts = Mapping[str, str]
# The outputs of a module's calls.
Outputs = list[tuple[Tensor, Dims]]
UNKNOWN = "?"
MOST_REASON = 200  # characters of another library's message
# What code raises for inputs that do not fit; other exceptions are defects and are not caught.
MISFITS = (
    *(RuntimeError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError),
)


@dataclass(frozen=True)
class SlotInfo:
    """A module whose output a seed could extend. `macs` is its own cost for one example.

    `layout` has a letter for each dimension of the output (B batch, C channels, T tokens or time,
    L length, D H W). It is "?" if unknown; then the user must give it before a seed can grow there.
    `shape` is without the batch, in the order of the layout. `widening` is the hidden layer that a
    bypass can widen. `second_path` is the reason why an export cannot make that layer itself twice
    as wide; "" if it can, None if nobody asked.
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
    second_path: str | None = None

    @property
    def widens(self) -> str:
        """What becomes of a bypass in an export."""
        if self.widening is None or self.second_path is None:
            return ""
        return f"second path: {self.second_path}" if self.second_path else "folds"


class SlotListing(list[SlotInfo]):
    """A list of SlotInfo that prints as a table. `refused` has the reasons of modules that cannot
    be slots for a cause that the user can remove, by name; `final` are the names of modules whose
    output is the model's; `stacks` are the lists of blocks that can grow in depth."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}
        self.final: set[str] = set()
        self.stacks: list[Any] = []

    def __repr__(self) -> str:
        head = (
            *("name", "module", "shape", "layout", "fits"),
            *("params", "multiply-adds", "calls", "widening"),
        )
        rows = [
            (s.name, s.module, "x".join(map(str, s.shape)), s.layout, s.topology, *others)
            for s in self
            for others in [(f"{s.params:,}", f"{s.macs:,}", str(s.calls), s.widens)]
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        ]
        # A reason is shown once, with the outermost modules that it holds for.
        outer = [n for n in self.refused if n.rpartition(".")[0] not in self.refused]
        for reason in dict.fromkeys(self.refused.values()):
            names = ", ".join(name for name in outer if self.refused[name] == reason)
            lines.append(f"no slots: {names}: {reason}")
        lines += map(str, self.stacks)
        return "\n".join(lines)

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


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """Raises ConfigError, "WHAT: the reason", for an error in a user's code."""
    try:
        yield
    except EsperError:
        raise
    except MISFITS as error:
        # Torch explains some errors on many lines.
        reason = " ".join(str(error).split("\n")[0].split())[:MOST_REASON]
        raise ConfigError(f"{what}: {reason or type(error).__name__}") from error


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
    refused: dict[nn.Module, str] = field(default_factory=dict)
    causal: bool = False

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.causal |= kwargs.get("is_causal") is True
        self.dataflow.record_call(module, args, output)
        if isinstance(module, nn.TransformerEncoder) and _packs_padding(module, args, kwargs):
            reason = NESTED.format(type(module).__name__)
            self.refused |= {each: reason for each in module.modules() if each is not module}
        location = locate_in_slot(output)
        features = None if location is None else location.get(output)
        if features is not None and features.layout == torch.strided and not features.is_nested:
            read = args[0] if args else next(iter(kwargs.values()), None)
            dims = dims_of_output(module, read, features, self.tracker)
            self.tracker[features] = dims
            self.outputs.setdefault(module, []).append((features, dims))


NESTED = (
    "{} passes nested tensors to its layers in evaluation, because it gets a padding mask, and "
    "most seeds cannot read those; make it with enable_nested_tensor=False"
)


def _packs_padding(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an encoder of torch drops padded positions in evaluation. In the recorded pass it
    does not, because hooks on operations switch that off."""
    mask = args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")
    return mask is not None and bool(getattr(module, "use_nested_tensor", False))


def not_running(model: nn.Module, error: Exception) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} does not run on the example ({error}); "
        "give one input as the training loader yields it"
    )


def inspect_model(model: nn.Module, example: Any, layout: Layouts | None = None) -> ModelInspection:
    """Run the model once on `example` and describe every possible slot, in order of use. The
    example may be on the CPU.

    `layout` gives layouts by module name where they are unknown. Raises ConfigError if the model
    cannot run on the example, and for an impossible layout.
    """
    batch = batch_size(example)
    if batch == 0:
        raise ConfigError("the example is empty; give an input of at least one")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"{type(model).__name__} is compiled by torch.jit, where no seed can act; give the "
            "model that it was made from"
        )
    example = on_device(example, input_device(model))
    tracker, dataflow, attention = DimsTracker(), DataflowTracer(), CausalAttentionDetector()
    recorder = _ForwardRecorder(tracker, dataflow)
    for tensor in tensors_in(example):
        if tensor.dim() > 0 and len(tensor) == batch:
            tracker[tensor] = Dims(batch=0)
        dataflow.add_input(tensor)
    handles = [
        handle
        for name, module in model.named_modules()
        if name
        for handle in (
            module.register_forward_pre_hook(dataflow.begin_call),
            module.register_forward_hook(recorder, with_kwargs=True),
        )
    ]
    counter = flop_counter()
    try:
        with evaluating(model), without_graphs(), counter, tracker, dataflow, attention:
            output = call_model(model, example)
    except MISFITS as error:
        raise not_running(model, error) from error
    finally:
        for handle in handles:
            handle.remove()
    outputs = recorder.outputs
    given = _check_layouts(model, layout or {}, outputs)
    flops = counter.get_flop_counts()
    listing = SlotListing()
    names = {module: name for name, module in model.named_modules()}
    for tensor in tensors_in(output):
        dataflow.add_output(tensor)
    for module, name in names.items():
        found = _slot_layout(outputs.get(module, []), given.get(name), batch, name)
        # A copy of a GraphModule loses its hooks.
        if found is None or isinstance(module, fx.GraphModule):
            continue
        if module in recorder.refused:
            listing.refused[name] = recorder.refused[module]
            continue
        macs = sum(flops.get(f"{type(model).__name__}.{name}", {}).values()) // 2 // batch
        shape = list(outputs[module][0][0].shape)
        del shape[found.index("B") if found != UNKNOWN else 0]
        listing.append(
            SlotInfo(
                name=name,
                module=type(module).__name__,
                shape=tuple(shape),
                layout=found,
                topology=TOPOLOGY_OF_LAYOUT.get(found, UNKNOWN),
                params=sum(p.numel() for p in module.parameters()),
                macs=macs,
                calls=len(outputs[module]),
                widening=dataflow.find_widening(module, names, batch),
            )
        )
    answers = {id(tensor) for tensor in tensors_in(output)}
    listing.final = {names[m] for m, seen in outputs.items() if id(seen[-1][0]) in answers}
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
        if not isinstance(letters, str) or letters not in TOPOLOGY_OF_LAYOUT:
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
    return UNKNOWN if 3 <= rank <= 5 and batch in shape[:2] else None


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
