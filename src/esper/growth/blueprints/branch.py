"""Branch seeds: a small path from a slot's features straight to the network's output.

A residual seed cannot widen a narrow trunk; a branch goes around it. Each takes the slot's
features and returns the change to add to the output: (B, outputs), or (B, T, outputs) for a
network with an output at every position.
"""

from torch import Tensor, nn

from esper.growth.blueprints.parts import group_norm, nearly_zero_

CONV_WIDTH = 8
POOL = 2
HIDDEN = 32


def cnn_branch(channels: int, outputs: int, *, per_position: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, CONV_WIDTH, 3, padding=1, bias=False),
        group_norm(CONV_WIDTH),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(POOL),
        nn.Flatten(),
        nearly_zero_(nn.Linear(CONV_WIDTH * POOL**2, outputs)),
    )


class PositionMean(nn.Module):
    """(B, T, C) -> (B, C)"""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def mlp_branch(channels: int, outputs: int, *, per_position: bool) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(channels),
        nn.Linear(channels, HIDDEN),
        nn.GELU(),
        nearly_zero_(nn.Linear(HIDDEN, outputs)),
    )


def sequence_branch(channels: int, outputs: int, *, per_position: bool) -> nn.Module:
    head = mlp_branch(channels, outputs, per_position=per_position)
    return head if per_position else nn.Sequential(PositionMean(), head)
