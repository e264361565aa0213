"""Which dimension of a module's output is the batch, and which the channels.

Many modules define it: a convolution has channels second, a recurrent layer has `batch_first`. For
others (activations, containers, a user's own blocks) dimensions are tracked through the operations
of one pass, from the model's input, whose first dimension is the batch. Anything else is unknown:
rank and sizes may fit by chance, so they prove nothing.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from esper.leyline import SEED_LAYOUTS

# Topology of the seeds for each layout: B batch, C channels, T tokens or time, L length, D H W.
TOPOLOGY_OF_LAYOUT = {
    **{layout: topology for topology, layout in SEED_LAYOUTS.items()},
    "TBC": "transformer",
    "BHWC": "cnn",
}
_LAYOUT_OF_POSITIONS = {
    (len(layout), layout.index("B"), layout.index("C")): layout for layout in TOPOLOGY_OF_LAYOUT
}

_CHANNELS_SECOND = (
    *("conv", "batchnorm", "instancenorm", "pooling", "padding", "upsampling"),
    *("pixelshuffle", "channelshuffle"),
)
_CHANNELS_LAST = (nn.Linear, nn.RMSNorm, nn.Embedding, nn.Bilinear)

# Operations that keep the order of dimensions, apart from those that torch tags as pointwise.
_KEEP_ORDER = {
    *("clone", "detach", "alias", "_to_copy", "copy", "contiguous", "native_dropout", "_softmax"),
    *("_log_softmax", "native_layer_norm", "_fused_rms_norm", "slice", "cat", "mean", "sum"),
    *("amax", "expand", "constant_pad_nd", "flip", "roll", "index_select", "repeat", "cumsum"),
    *("split", "split_with_sizes", "masked_fill"),
}
_RESHAPE = {"view", "_unsafe_view", "unsqueeze", "squeeze", "reshape", "_reshape_alias"}


@dataclass(frozen=True)
class Dims:
    """Indices of the batch and channel dimensions; None if unknown."""

    batch: int | None = None
    channels: int | None = None


UNKNOWN = Dims()


def layout_of(dims: Dims, rank: int) -> str | None:
    if dims.batch is None or dims.channels is None:
        return None
    return _LAYOUT_OF_POSITIONS.get((rank, dims.batch, dims.channels))


class DimsTracker(TorchDispatchMode):
    """Tracks batch and channels of tensors in the code that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.known = WeakTensorKeyDictionary()

    def __getitem__(self, tensor: Any) -> Dims:
        return self.known.get(tensor, UNKNOWN) if isinstance(tensor, Tensor) else UNKNOWN

    def __setitem__(self, tensor: Tensor, dims: Dims) -> None:
        self.known[tensor] = dims

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                dims = self._after(func, args, tensor)
                if dims != UNKNOWN:
                    self.known[tensor] = dims
        return result

    def _after(self, func: Any, args: Sequence[Any], result: Tensor) -> Dims:
        name = func.overloadpacket.__name__
        if "pool" in name or "upsample" in name or "convolution" in name:
            return Dims(0, 1)
        operands = args[0] if args and isinstance(args[0], (tuple, list)) else args
        for operand in operands:
            dims = self[operand]
            if dims == UNKNOWN:
                continue
            if name in _RESHAPE:
                return _reshaped(dims, operand.shape, result.shape)
            if name in ("permute", "transpose", "t"):
                order = permutation(name, operand.dim(), args[1:])
                now = (None if d is None else order.index(d) for d in (dims.batch, dims.channels))
                return Dims(*now)
            same = operand.shape == result.shape
            if same and torch.Tag.pointwise in func.tags:
                return dims
            if name in _KEEP_ORDER and operand.dim() == result.dim():
                return dims
        return UNKNOWN


class CausalAttentionDetector(TorchFunctionMode):
    """`found` is True once attention ran with `is_causal=True`."""

    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            is_causal = args[5] if len(args) > 5 else (kwargs or {}).get("is_causal")
            self.found |= is_causal is True
        return func(*args, **(kwargs or {}))


def permutation(name: str, rank: int, args: Sequence[Any]) -> list[int]:
    """The order of dimensions after `permute`, `transpose` or `t` with these arguments."""
    order = list(range(rank))
    if name == "permute":
        return [d % rank for d in args[0]]
    if rank > 1:
        one, other = (d % rank for d in args[:2]) if name == "transpose" else (0, 1)
        order[one], order[other] = other, one
    return order


def _reshaped(dims: Dims, before: torch.Size, after: torch.Size) -> Dims:
    """A dimension is kept if its size, and the product of the sizes before it, are the same."""

    def still(dim: int | None) -> int | None:
        if dim is None:
            return None
        ahead = math.prod(before[:dim])
        fitting = (i for i, size in enumerate(after) if size == before[dim])
        found = [i for i in fitting if math.prod(after[:i]) == ahead]
        return found[0] if len(found) == 1 else None

    return Dims(still(dims.batch), still(dims.channels))


def dims_of_output(module: nn.Module, read: Any, features: Tensor, tracker: DimsTracker) -> Dims:
    """Batch and channels of a module's output: as its type defines them, else as tracked.

    `read` is the module's first argument. Contradictions make the dimensions unknown.
    """
    rank, tracked, fed = features.dim(), tracker[features], tracker[read]
    families = {
        cls.__module__.rpartition(".")[2]
        for cls in type(module).__mro__
        if cls.__module__.startswith("torch.nn.modules.")
    }
    if isinstance(module, nn.RNNBase) or families & {"activation", "transformer"}:
        sequential = [
            m for m in module.modules() if isinstance(m, (nn.RNNBase, nn.MultiheadAttention))
        ]
        if sequential and rank == 3:
            said = Dims(0 if sequential[0].batch_first else 1, 2)
            return said if _agree(said, fed, rank, read) else UNKNOWN
    if families & set(_CHANNELS_SECOND) or isinstance(
        module, (nn.GroupNorm, nn.LocalResponseNorm, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    ):
        meant = re.search(r"(\d)d$", type(module).__name__)
        fits = meant is None or rank in (int(meant[1]) + 2, 2)
        said = Dims(0, 1)
        return said if fits and _agree(said, fed, rank, read) else UNKNOWN
    if isinstance(module, _CHANNELS_LAST) or (
        isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1
    ):
        # These change the last dimension only.
        return Dims(fed.batch if tracked.batch is None else tracked.batch, rank - 1)
    return tracked


def _agree(said: Dims, fed: Dims, rank: int, read: Any) -> bool:
    same_rank = isinstance(read, Tensor) and read.dim() == rank
    return fed.batch in (None, said.batch) or not same_rank
