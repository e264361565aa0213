"""Residual seeds for feature maps (B, C, H, W): each returns the change to add, same shape.

The convolutional ones are in pre-activation order (norm, ReLU, convolution; He et al. 2016): a
ReLU behind a tiny layer dies as soon as the layer's bias drifts below zero.
"""

import torch
from torch import Tensor, nn

from esper.growth.blueprints.parts import Renormalize, group_norm, nearly_zero_


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


def _normalized(channels: int) -> list[nn.Module]:
    return [group_norm(channels), nn.ReLU()]


def _conv(channels: int, kernel: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False)


def conv_small(channels: int) -> nn.Module:
    return nn.Sequential(*_normalized(channels), nearly_zero_(_conv(channels, 1)))


def conv_light(channels: int) -> nn.Module:
    return nn.Sequential(*_normalized(channels), nearly_zero_(_conv(channels, 3)))


def conv_heavy(channels: int) -> nn.Module:
    return nn.Sequential(
        *_normalized(channels),
        _conv(channels, 3),
        *_normalized(channels),
        nearly_zero_(_conv(channels, 3)),
    )


def depthwise(channels: int) -> nn.Module:
    return nn.Sequential(
        *_normalized(channels),
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        nearly_zero_(_conv(channels, 1)),
    )


def bottleneck(channels: int) -> nn.Module:
    width = max(8, channels // 4)
    return nn.Sequential(
        group_norm(channels),
        nn.Conv2d(channels, width, 1, bias=False),
        nn.ReLU(),
        _conv(width, 3),
        nn.ReLU(),
        nearly_zero_(nn.Conv2d(width, channels, 1, bias=False)),
    )
