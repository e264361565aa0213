"""Which layer reads what another one gave out, and what the host does in between.

In one pass every tensor carries its trail: the layer it comes from and the steps since. A trail
ends where two layers meet, as in residual additions, and where a step is not known.
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
from esper.leyline import LayerSpec, Step, Widening

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)

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
# Stands for everything that bends and is not known by name.
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
class Trail:
    """The layer a tensor comes from and the steps since; without a layer, they are not known."""

    layer: nn.Module | None = None
    steps: tuple[Step, ...] = ()


LOST = Trail()


@dataclass(frozen=True, eq=False)
class _Pair:
    first: nn.Module
    second: nn.Module
    steps: tuple[Step, ...]


class DataflowTracer(TorchDispatchMode):
    """Follows what runs inside. Call `begin` with the model's inputs, and `passed` after every
    module."""

    def __init__(self) -> None:
        super().__init__()
        self.known = WeakTensorKeyDictionary()
        self.pairs: list[_Pair] = []
        self.calls: Counter[nn.Module] = Counter()
        self.shapes: dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def begin(self, tensor: Tensor) -> None:
        self.known[tensor] = LOST

    def passed(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        read = args[0] if args else None
        if not (isinstance(read, Tensor) and isinstance(output, Tensor)):
            return
        trail = self.known.get(read, LOST)
        if isinstance(module, _LAYERS):
            self.calls[module] += 1
            self.shapes[module] = tuple(read.shape), tuple(output.shape)
            if trail.layer is not None:
                self.pairs.append(_Pair(trail.layer, module, trail.steps))
            self.known[output] = Trail(module)
        elif trail.layer is not None and (step := _module_step(module)) is not None:
            self.known[output] = replace(trail, steps=(*trail.steps, step))

    def widening(
        self, module: nn.Module, names: dict[nn.Module, str], batch: int
    ) -> Widening | None:
        """The last hidden layer inside `module` (or `module` itself) that can be made wider.

        Layers that a pass uses several times cannot.
        """
        inside = set(module.modules())
        for pair in reversed(self.pairs):
            if pair.first not in inside or {self.calls[pair.first], self.calls[pair.second]} != {1}:
                continue
            found = Widening(
                _layer_spec(pair.first, names[pair.first]),
                _layer_spec(pair.second, names[pair.second]),
                pair.steps,
                self.shapes[pair.first][0],
                self.shapes[pair.second][1],
                batch,
            )
            if _keeps_positions(found) and can_widen(found):
                return found
        return None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        before = [self.known[t] for t in _tensors(args) if t in self.known]
        # Before the call: an operation in place changes what it read.
        read = next((t for t in _tensors(args) if t in self.known), None)
        shape = None if read is None else tuple(read.shape)
        result = func(*args, **(kwargs or {}))
        if shape is not None:
            results = _tensors([result])
            for first in results[:1]:
                self.known[first] = _after(before, func, shape, args, kwargs or {}, first)
            for other in results[1:]:
                self.known[other] = LOST
        return result


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [
        tensor
        for value in values
        for tensor in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(tensor, Tensor)
    ]


def _after(
    before: list[Trail],
    func: Any,
    shape: tuple[int, ...],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Tensor,
) -> Trail:
    """The trail of an operation's result, of whose operands `before` are those that have one."""
    name = func.overloadpacket.__name__.rstrip("_")
    pointwise = torch.Tag.pointwise in func.tags and tuple(result.shape) == shape
    first, *others = before
    if any(trail.layer is not first.layer for trail in others) or first.layer is None:
        return LOST
    if others:
        return replace(first, steps=(*_common(before), _ANY_ACTIVATION)) if pointwise else LOST
    steps = _activation(name, args, kwargs) or _shaping(name, shape, args, result)
    if steps is None and pointwise:
        steps = [] if name in _SCALING else [_ANY_ACTIVATION]
    if steps is None and name in _SCALING and tuple(result.shape) == shape:
        steps = []
    return LOST if steps is None else replace(first, steps=(*first.steps, *steps))


def _common(dataflow: list[Trail]) -> tuple[Step, ...]:
    """What happened before a layer's output parted and met again, as in x * sigmoid(x)."""
    same = []
    for steps in zip(*(trail.steps for trail in dataflow), strict=False):
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
            return [("Permute", *_order(name, len(shape), args[1:]))]
    if name in _RESHAPES:
        return _flattening(shape, tuple(result.shape))
    return None


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, list)) else value


def _order(name: str, rank: int, args: Sequence[Any]) -> list[int]:
    if name == "permute":
        return [d % rank for d in args[0]]
    order = list(range(rank))
    one, other = (d % rank for d in (args[:2] if name == "transpose" else (0, rank - 1)))
    order[one], order[other] = other, one
    return order


def _flattening(before: tuple[int, ...], after: tuple[int, ...]) -> list[Step] | None:
    """The dimensions that became one; None if that is not all that happened."""
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
    """What operations do not show: dropout rests in evaluation, RMSNorm is made of many."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return (type(module).__name__, module.p) if hasattr(nn, type(module).__name__) else None
    if isinstance(module, nn.RMSNorm):
        return "RMSNorm", len(module.normalized_shape), module.eps, module.elementwise_affine
    return None


def _keeps_positions(widening: Widening) -> bool:
    """Of maps the examples must stay apart, of anything else all positions: so a blend can be
    gated for each of them."""
    reads, adds = widening.reads, widening.adds
    if widening.first.kind == "Linear":
        return reads[:-1] == adds[:-1]
    return reads[0] == adds[0] == widening.batch


def _layer_spec(layer: nn.Module, name: str) -> LayerSpec:
    if isinstance(layer, nn.Linear):
        return LayerSpec(
            name, "Linear", layer.in_features, layer.out_features, layer.bias is not None
        )
    assert isinstance(layer, _CONVOLUTIONS)
    kind = next(cls.__name__ for cls in _CONVOLUTIONS if isinstance(layer, cls))
    return LayerSpec(
        name,
        kind,
        layer.in_channels,
        layer.out_channels,
        layer.bias is not None,
        tuple(layer.kernel_size),
        tuple(layer.stride),
        _plain(layer.padding),
        tuple(layer.dilation),
        layer.padding_mode,
    )
