"""Pieces the blueprints share. All of them keep a seed close to zero at birth, and alive.

A seed starts with a last map that is tiny, not zero: its effect is below a thousandth of the
host's features, yet every one of its parameters receives a gradient from the first step.
"""

import torch
from torch import Tensor, nn

TINY = 1e-4


def nearly_zero_(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    """Shrink a linear or convolutional layer so that its output is about TINY times its input."""
    weight = layer.weight
    fan_in = weight[0].numel()
    nn.init.normal_(weight, std=TINY / fan_in**0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def group_count(channels: int) -> int:
    """Groups for GroupNorm: at least 16 channels each, so one group for narrow layers."""
    return next(
        groups
        for groups in (32, 16, 8, 4, 2, 1)
        if groups == 1 or (channels % groups == 0 and channels // groups >= 16)
    )


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(group_count(channels), channels)


class Renormalize(nn.Module):
    """tanh(s) * (norm(x) - x): moves the features towards their normalised form."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.strength = nn.Parameter(torch.tensor(TINY))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.strength) * (self.norm(x) - x)
