"""Bypasses: seeds that widen a hidden layer of the host.

A bypass reads what the layer reads and adds to what the next layer gives out, as further channels
of the layer would: a layer like it, what the host does in between (with a norm of their own for the
newcomers), and a map like the next layer without a bias, tiny at birth. It is a valid addition
whatever else reads the layer; between two layers of a plain chain it is the same as a wider layer.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.blueprints.modules import nearly_zero_
from esper.leyline import LayerSpec, Step, Widening

# A LayerNorm of fewer channels leaves hardly anything of them, and so no gradient.
LEAST_NORMED = 4
_OVER_CHANNELS = ("LayerNorm", "RMSNorm")
_BATCH_NORM = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
Maker = Callable[[], Any]


class Mean(nn.Module):
    def __init__(self, dims: tuple[int, ...], keepdim: bool = False) -> None:
        super().__init__()
        self.dims, self.keepdim = dims, keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=self.dims, keepdim=self.keepdim)


class Permute(nn.Module):
    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


class Unsqueeze(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(self.dim)


_OWN: dict[str, Callable[..., nn.Module]] = {
    "Mean": Mean,
    "Permute": Permute,
    "Unsqueeze": Unsqueeze,
}


def widen(widening: Widening, share: float) -> nn.Module:
    """A bypass with `share` of the layer's channels, at least one."""
    normed = any(step[0] in _OVER_CHANNELS for step in widening.steps)
    width = max(LEAST_NORMED if normed else 1, int(share * widening.first.outputs))
    parts: list[Any] = [make() for make in _makers(widening, width)]
    nearly_zero_(parts[-1])
    return nn.Sequential(*parts)


def can_widen(widening: Widening) -> bool:
    """Does a bypass of any width give what is added to? Nothing is made."""
    try:
        # Two widths: channels that the host moved elsewhere change another dimension.
        for width in (widening.first.outputs, widening.first.outputs + 1):
            _makers(widening, width)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return True


@lru_cache(maxsize=4096)
def _makers(widening: Widening, width: int) -> tuple[Maker, ...]:
    """How each part is made. Raises ValueError or RuntimeError if they do not fit together."""
    first, second = widening.first, widening.second
    makers: list[Maker] = [partial(_layer, first, first.inputs, width, first.bias)]
    with torch.device("meta"), torch.no_grad():
        x = makers[0]()(torch.zeros(widening.reads))
        for step in widening.steps:
            makers.append(_step(step, x.shape, widening))
            x = makers[-1]().eval()(x)
        inputs = x.shape[-1 if second.kind == "Linear" else 1]
        makers.append(partial(_layer, second, inputs, second.outputs, False))
        x = makers[-1]()(x)
    if tuple(x.shape) != widening.adds:
        raise ValueError(f"{tuple(x.shape)} instead of {widening.adds}")
    return tuple(makers)


def _layer(spec: LayerSpec, inputs: int, outputs: int, bias: bool) -> Any:
    if spec.kind == "Linear":
        return nn.Linear(inputs, outputs, bias=bias)
    return getattr(nn, spec.kind)(
        inputs,
        outputs,
        spec.kernel,
        stride=spec.stride,
        padding=spec.padding,
        dilation=spec.dilation,
        bias=bias,
        padding_mode=spec.padding_mode,
    )


def _step(step: Step, shape: torch.Size, widening: Widening) -> Maker:
    """A norm is made for the channels that there are: they are a cohort of their own."""
    name, *settings = step
    match name:
        case "BatchNorm":
            return partial(_BATCH_NORM[len(shape)], shape[1], *settings)
        case "GroupNorm":
            groups, *settings = settings
            # As large as the host's groups are, if that comes out even.
            share = math.gcd(max(1, groups * shape[1] // widening.first.outputs), shape[1])
            return partial(nn.GroupNorm, share, shape[1], *settings)
        case "LayerNorm" | "RMSNorm":
            dims, *settings = settings
            return partial(getattr(nn, name), tuple(shape[-dims:]), *settings)
    return partial(_OWN.get(name) or getattr(nn, name), *settings)
