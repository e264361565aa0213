"""Which layer reads the output of which other layer, and what the host does in between.

In one pass every tensor has an origin: the layer it comes from and the steps since. The origin is
unknown after an operation on two layers, such as a residual addition, or an unknown operation.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from esper.growth.blueprints.bypass import can_widen
from esper.growth.layouts import permutation
from esper.growth.outputs import tensors_in
from esper.leyline import LayerSpec, Step, Widening

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *_CONVOLUTIONS)
_CONVOLUTION_SETTINGS = ("kernel_size", "stride", "padding", "dilation", "padding_mode")

_ACTIVATIONS = {
    "relu": "ReLU",
    "silu": "SiLU",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "hardtanh": "Hardtanh",
    "leaky_relu": "LeakyReLU",
    "softplus": "Softplus",
    "hardswish": "Hardswish",
    "mish": "Mish",
    "celu": "CELU",
}
# Stands for every other pointwise non-linear operation.
_ANY_ACTIVATION: Step = ("ReLU",)
_SCALING = {"add", "sub", "rsub", "mul", "div", "neg"}
_COPYING = {"clone", "detach", "alias", "contiguous"}
_POOLS = {
    "max_pool2d_with_indices": "MaxPool2d",
    "max_pool3d_with_indices": "MaxPool3d",
    "avg_pool2d": "AvgPool2d",
    "avg_pool3d": "AvgPool3d",
    "_adaptive_avg_pool2d": "AdaptiveAvgPool2d",
    "_adaptive_avg_pool3d": "AdaptiveAvgPool3d",
}
_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze"}


@dataclass(frozen=True, eq=False)
class TensorOrigin:
    """The layer a tensor comes from and the steps since; None if unknown. `inexact` is the name of
    an operation that the steps leave out or replace, if there is one."""

    layer: nn.Module | None = None
    steps: tuple[Step, ...] = ()
    inexact: str = ""


UNKNOWN = TensorOrigin()


@dataclass(frozen=True, eq=False)
class _LayerPair:
    first: nn.Module
    second: nn.Module
    origin: TensorOrigin


class DataflowTracer(TorchDispatchMode):
    """Tracks tensors in the code that runs inside. Call `add_input` with the model's inputs,
    `begin_call` before and `record_call` after every module, and `add_output` at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.origins = WeakTensorKeyDictionary()
        self.pairs: list[_LayerPair] = []
        self.calls: Counter[nn.Module] = Counter()
        # Which layers read the output of a layer; None stands for all other code.
        self.readers: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
        # Modules that return the output of a layer or what became of it.
        self.passed: dict[nn.Module, list[nn.Module]] = defaultdict(list)
        self.inside: nn.Module | None = None
        self.shapes: dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def add_input(self, tensor: Tensor) -> None:
        self.origins[tensor] = UNKNOWN

    def add_output(self, tensor: Tensor) -> None:
        self._note_reader(self.origins.get(tensor, UNKNOWN), None)

    def begin_call(self, module: nn.Module, args: Sequence[Any]) -> None:
        if isinstance(module, LAYERS):
            self.inside = module

    def record_call(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        self.calls[module] += 1
        read = args[0] if args else None
        if isinstance(read, Tensor) and isinstance(output, Tensor):
            origin = self.origins.get(read, UNKNOWN)
            if isinstance(module, LAYERS):
                self.shapes[module] = tuple(read.shape), tuple(output.shape)
                if origin.layer is not None:
                    self.pairs.append(_LayerPair(origin.layer, module, origin))
                self.origins[output] = TensorOrigin(module)
            elif origin.layer is not None and (step := _module_step(module)) is not None:
                self.origins[output] = replace(origin, steps=(*origin.steps, step))
        if isinstance(module, LAYERS):
            self.inside = None
        for tensor in tensors_in(output):
            layer = self.origins.get(tensor, UNKNOWN).layer
            if layer is not None and module not in self.passed[layer]:
                self.passed[layer].append(module)

    def find_widening(
        self, module: nn.Module, names: dict[nn.Module, str], batch: int
    ) -> Widening | None:
        """The last hidden layer inside `module` (or `module` itself) that a bypass can widen.

        Layers that are called several times in a pass cannot be widened.
        """
        inside = set(module.modules())
        for pair in reversed(self.pairs):
            if pair.first not in inside or {self.calls[pair.first], self.calls[pair.second]} != {1}:
                continue
            first, second = (_layer_spec(x, names[x]) for x in (pair.first, pair.second))
            reads, adds = self.shapes[pair.first][0], self.shapes[pair.second][1]
            wider = self.passed[pair.first]
            found = Widening(
                first,
                second,
                pair.origin.steps,
                reads,
                adds,
                batch,
                tuple(names[module] for module in wider),
                self._obstacle(pair, wider),
            )
            if _keeps_positions(found) and can_widen(found):
                return found
        return None

    def _obstacle(self, pair: _LayerPair, wider: list[nn.Module]) -> str:
        if self.readers[pair.first] != {pair.second}:
            return "read elsewhere, too"
        if pair.origin.inexact:
            return f"operation {pair.origin.inexact}"
        shared = [m for m in wider if self.calls[m] > 1 and any(True for _ in m.parameters())]
        return f"{type(shared[0]).__name__} used several times" if shared else ""

    def _note_reader(self, origin: TensorOrigin, reader: nn.Module | None) -> None:
        if origin.layer is not None:
            self.readers[origin.layer].add(reader)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        before = [self.origins[t] for t in _tensors(args) if t in self.origins]
        # Before the call: an operation in place changes what it read.
        read = next((t for t in _tensors(args) if t in self.origins), None)
        shape = None if read is None else tuple(read.shape)
        result = func(*args, **(kwargs or {}))
        if shape is not None:
            results = _tensors([result])
            for first in results[:1]:
                self.origins[first] = _after(before, func, shape, args, kwargs or {}, first)
            for other in results[1:]:
                self.origins[other] = UNKNOWN
            if self.inside is not None or not results or self.origins[results[0]].layer is None:
                for origin in before:
                    self._note_reader(origin, self.inside)
        return result


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [
        tensor
        for value in values
        for tensor in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(tensor, Tensor)
    ]


def _after(
    before: list[TensorOrigin],
    func: Any,
    shape: tuple[int, ...],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Tensor,
) -> TensorOrigin:
    """The origin of an operation's result; `before` are the origins of its operands."""
    name = func.overloadpacket.__name__.rstrip("_")
    pointwise = torch.Tag.pointwise in func.tags and tuple(result.shape) == shape
    first, *others = before
    if any(origin.layer is not first.layer for origin in others) or first.layer is None:
        return UNKNOWN
    if others:
        steps = (*_common(before), _ANY_ACTIVATION)
        return replace(first, steps=steps, inexact=name) if pointwise else UNKNOWN
    found = _activation(name, args, kwargs) or _shaping(name, shape, args, result)
    same_shape = tuple(result.shape) == shape
    if found is None and name in _COPYING and same_shape:
        found = []
    if found is not None:
        return replace(first, steps=(*first.steps, *found))
    if name in _SCALING and same_shape:
        return replace(first, inexact=name)
    steps = (*first.steps, _ANY_ACTIVATION)
    return replace(first, steps=steps, inexact=name) if pointwise else UNKNOWN


def _common(origins: list[TensorOrigin]) -> tuple[Step, ...]:
    """The shared first steps of two paths from one layer, as in x * sigmoid(x)."""
    same = []
    for steps in zip(*(origin.steps for origin in origins), strict=False):
        if len(set(steps)) > 1:
            break
        same.append(steps[0])
    return tuple(same)


def _activation(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Step] | None:
    if name in _ACTIVATIONS:
        return [(_ACTIVATIONS[name], *args[1:])]
    if name == "gelu":
        return [("GELU", kwargs.get("approximate", "none"))]
    if name == "elu":
        return [("ELU", *args[1:2]) if len(args) < 3 else ("SELU",)]
    return [("PReLU",)] if name == "_prelu_kernel" else None


def _shaping(
    name: str, shape: tuple[int, ...], args: Sequence[Any], result: Tensor
) -> list[Step] | None:
    """Norms, pools and changes of shape; None for anything else."""
    if name in _POOLS:
        settings = [_plain(value) for value in args[1:]]
        if name.startswith("max_pool") and len(settings) > 4:
            settings.insert(4, False)  # the module's `return_indices`
        return [(_POOLS[name], *settings)]
    match name:
        case "native_batch_norm":
            return [("BatchNorm", args[7], 0.1, args[1] is not None, args[3] is not None)]
        case "native_group_norm":
            return [("GroupNorm", args[6], args[7], args[1] is not None)]
        case "native_layer_norm":
            return [("LayerNorm", len(args[1]), args[4], args[2] is not None, args[3] is not None)]
        case "mean" if len(args) > 1:
            return [("Mean", *(_plain(value) for value in args[1:3]))]
        case "unsqueeze":
            return [("Unsqueeze", args[1])]
        case "permute" | "transpose" | "t":
            return [("Permute", *permutation(name, len(shape), args[1:]))]
    if name in _RESHAPES:
        return _flattening(shape, tuple(result.shape))
    return None


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, list)) else value


def _flattening(before: tuple[int, ...], after: tuple[int, ...]) -> list[Step] | None:
    """A flatten of neighbouring dimensions; None for any other change of shape."""
    if before == after:
        return []
    merged = len(before) - len(after) + 1
    for start in reversed(range(len(after))):
        end = start + merged
        size = int(torch.Size(before[start:end]).numel())
        if merged > 1 and (*before[:start], size, *before[end:]) == after:
            return [("Flatten", start, end - 1)]
    return None


def _module_step(module: nn.Module) -> Step | None:
    """Steps that operations do not show: dropout does nothing in evaluation, RMSNorm is several
    operations, BatchNorm has a momentum in training."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return (type(module).__name__, module.p) if hasattr(nn, type(module).__name__) else None
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        settings = module.eps, module.momentum, module.affine, module.track_running_stats
        return "BatchNorm", *settings
    if isinstance(module, nn.RMSNorm):
        return "RMSNorm", len(module.normalized_shape), module.eps, module.elementwise_affine
    return None


def _keeps_positions(widening: Widening) -> bool:
    """A gated blend needs separate examples for feature maps, separate positions otherwise."""
    reads, adds = widening.reads, widening.adds
    if widening.first.kind == "Linear":
        return reads[:-1] == adds[:-1]
    return reads[0] == adds[0] == widening.batch


def _layer_spec(layer: nn.Module, name: str) -> LayerSpec:
    kind = next(cls.__name__ for cls in LAYERS if isinstance(layer, cls))
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return LayerSpec(name, kind, layer.in_features, layer.out_features, bias)
    assert isinstance(layer, _CONVOLUTIONS)
    settings = tuple((setting, getattr(layer, setting)) for setting in _CONVOLUTION_SETTINGS)
    return LayerSpec(name, kind, layer.in_channels, layer.out_channels, bias, settings)
