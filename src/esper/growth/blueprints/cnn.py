"""Residual seeds for feature maps (B, C, H, W): each returns the change to add, same shape."""

import torch
from torch import Tensor, nn

from esper.growth.blueprints.parts import TINY, Renormalize, group_norm, nearly_zero_


def norm(channels: int) -> nn.Module:
    return Renormalize(group_norm(channels))


class ChannelAttention(nn.Module):
    """x * tanh(z / 2), z from the pooled channels: the centred form of squeeze-and-excitation.

    The gate is 1 + tanh(z / 2) = 2 * sigmoid(z), which is exactly 1 for z = 0.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(1, channels // 4)
        self.squeeze = nn.Linear(channels, hidden, bias=False)
        # ReLU would leave a narrow squeeze dead whenever all its units start below zero.
        self.act = nn.SiLU()
        self.excite = nearly_zero_(nn.Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        z = self.excite(self.act(self.squeeze(x.mean(dim=(2, 3)))))
        return x * torch.tanh(z / 2)[:, :, None, None]


def attention(channels: int) -> nn.Module:
    return ChannelAttention(channels)


def depthwise(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        group_norm(channels, scale=TINY),
        nn.ReLU(),
    )


def bottleneck(channels: int) -> nn.Module:
    width = max(8, channels // 4)
    return nn.Sequential(
        nn.Conv2d(channels, width, 1, bias=False),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(width, channels, 1, bias=False),
        group_norm(channels, scale=TINY),
    )


def _conv_block(channels: int, kernel: int, scale: float) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False),
        group_norm(channels, scale=scale),
        nn.ReLU(),
    ]


def conv_small(channels: int) -> nn.Module:
    return nn.Sequential(*_conv_block(channels, 1, TINY))


def conv_light(channels: int) -> nn.Module:
    return nn.Sequential(*_conv_block(channels, 3, TINY))


def conv_heavy(channels: int) -> nn.Module:
    return nn.Sequential(*_conv_block(channels, 3, 1.0), *_conv_block(channels, 3, TINY))
