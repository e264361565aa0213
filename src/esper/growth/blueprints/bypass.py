"""Bypasses: seeds that widen a hidden layer of the host.

A bypass reads the layer's input and adds to the output of the next layer, as more channels of the
layer would: a layer of the same kind, the host's steps in between (with norms of its own), and a
layer like the next one without bias, tiny at first. In a plain chain this equals a wider layer.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.blueprints.modules import nearly_zero_
from esper.leyline import LayerSpec, Step, Widening

# A LayerNorm over fewer channels has almost no gradient.
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
    layers = path(widening, width)
    nearly_zero_(layers[-1])
    return nn.Sequential(*layers)


def path(widening: Widening, width: int) -> list[Any]:
    """The layers of a bypass with that many channels, with torch's own initialization.

    Raises ValueError or RuntimeError if they do not fit together.
    """
    return [make() for make in _makers(widening, width)]


def can_widen(widening: Widening) -> bool:
    """Does a bypass of any width return the right shape? It runs on the meta device."""
    try:
        # Two widths, because the host may have moved channels to another dimension.
        for width in (widening.first.outputs, widening.first.outputs + 1):
            _makers(widening, width)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return True


@lru_cache(maxsize=4096)
def _makers(widening: Widening, width: int) -> tuple[Maker, ...]:
    """Factories of the layers. Raises ValueError or RuntimeError if they do not fit together."""
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
    return getattr(nn, spec.kind)(inputs, outputs, bias=bias, **dict(spec.settings))


def _step(step: Step, shape: torch.Size, widening: Widening) -> Maker:
    """The factory of a step; a norm is made for the bypass's own channels."""
    name, *settings = step
    match name:
        case "BatchNorm":
            return partial(_BATCH_NORM[len(shape)], shape[1], *settings)
        case "GroupNorm":
            groups, *settings = settings
            # Groups as large as the host's, if that divides the channels.
            share = math.gcd(max(1, groups * shape[1] // widening.first.outputs), shape[1])
            return partial(nn.GroupNorm, share, shape[1], *settings)
        case "LayerNorm" | "RMSNorm":
            dims, *settings = settings
            return partial(getattr(nn, name), tuple(shape[-dims:]), *settings)
    return partial(_OWN.get(name) or getattr(nn, name), *settings)
