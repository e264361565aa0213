"""Which layer reads the output of which other layer, and what the host does in between.

In one pass every tensor has an origin: the layer it comes from and the steps since. The origin is
unknown after an operation on two layers, such as a residual addition, or an unknown operation.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from esper.growth.blueprints.bypass import can_widen
from esper.growth.layouts import permutation
from esper.leyline import LayerSpec, Step, Widening

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)
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
_SCALING = {"add", "sub", "rsub", "mul", "div", "neg", "clone", "detach", "alias", "contiguous"}
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
    """The layer a tensor comes from and the steps since; None if unknown."""

    layer: nn.Module | None = None
    steps: tuple[Step, ...] = ()


UNKNOWN = TensorOrigin()


@dataclass(frozen=True, eq=False)
class _LayerPair:
    first: nn.Module
    second: nn.Module
    steps: tuple[Step, ...]


class DataflowTracer(TorchDispatchMode):
    """Tracks tensors in the code that runs inside. Call `add_input` with the model's inputs, and
    `record_call` after every module."""

    def __init__(self) -> None:
        super().__init__()
        self.origins = WeakTensorKeyDictionary()
        self.pairs: list[_LayerPair] = []
        self.calls: Counter[nn.Module] = Counter()
        self.shapes: dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def add_input(self, tensor: Tensor) -> None:
        self.origins[tensor] = UNKNOWN

    def record_call(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        read = args[0] if args else None
        if not (isinstance(read, Tensor) and isinstance(output, Tensor)):
            return
        origin = self.origins.get(read, UNKNOWN)
        if isinstance(module, _LAYERS):
            self.calls[module] += 1
            self.shapes[module] = tuple(read.shape), tuple(output.shape)
            if origin.layer is not None:
                self.pairs.append(_LayerPair(origin.layer, module, origin.steps))
            self.origins[output] = TensorOrigin(module)
        elif origin.layer is not None and (step := _module_step(module)) is not None:
            self.origins[output] = replace(origin, steps=(*origin.steps, step))

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
            found = Widening(first, second, pair.steps, reads, adds, batch)
            if _keeps_positions(found) and can_widen(found):
                return found
        return None

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
        return replace(first, steps=(*_common(before), _ANY_ACTIVATION)) if pointwise else UNKNOWN
    steps = _activation(name, args, kwargs) or _shaping(name, shape, args, result)
    if steps is None and pointwise:
        steps = [] if name in _SCALING else [_ANY_ACTIVATION]
    if steps is None and name in _SCALING and tuple(result.shape) == shape:
        steps = []
    return UNKNOWN if steps is None else replace(first, steps=(*first.steps, *steps))


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
    operations."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return (type(module).__name__, module.p) if hasattr(nn, type(module).__name__) else None
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
    kind = next(cls.__name__ for cls in _LAYERS if isinstance(layer, cls))
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return LayerSpec(name, kind, layer.in_features, layer.out_features, bias)
    assert isinstance(layer, _CONVOLUTIONS)
    settings = tuple((setting, getattr(layer, setting)) for setting in _CONVOLUTION_SETTINGS)
    return LayerSpec(name, kind, layer.in_channels, layer.out_channels, bias, settings)
