"""Modules that seeds are made of, for feature maps, sequences (B, T, C) and vectors (B, C).

Feature maps have 1 to 3 `dims`: (B, C, L), (B, C, H, W) or (B, C, D, H, W).

The last layer of a seed starts tiny, not zero: the effect is below a thousandth of the host's
features, yet every parameter gets a gradient from the first step. Residual seeds return the change
to add to their input. A branch is a small path from a slot's features to the network's output,
(B, outputs), or (B, T, outputs) for a network with an output at every position: a residual seed
cannot widen a narrow network, a branch bypasses it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline import ConfigError

TINY = 1e-4


def nearly_zero_(layer: nn.Linear | nn.modules.conv._ConvNd) -> nn.Module:
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


# --- for feature maps ------------------------------------------------------------------------
#
# Convolutional seeds are in pre-activation order (norm, ReLU, convolution; He et al. 2016): a ReLU
# behind a tiny layer has no gradient as soon as the bias of the layer is below zero.


_CONVOLUTION = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_POOLING = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}


def cnn_norm(channels: int, dims: int = 2) -> nn.Module:
    return Renormalize(group_norm(channels))


class ChannelAttention(nn.Module):
    """x * tanh(z / 2), z from the pooled channels: the centred form of squeeze-and-excitation.

    The gate is 1 + tanh(z / 2) = 2 * sigmoid(z), which is exactly 1 for z = 0.
    """

    def __init__(self, channels: int, dims: int = 2) -> None:
        super().__init__()
        self.dims = dims
        hidden = max(1, channels // 4)
        self.squeeze = nn.Linear(channels, hidden, bias=False)
        # With ReLU a narrow squeeze has no gradient if all its units start below zero.
        self.act = nn.SiLU()
        self.excite = nearly_zero_(nn.Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean(dim=tuple(range(2, 2 + self.dims)))
        z = self.excite(self.act(self.squeeze(pooled)))
        return x * torch.tanh(z / 2)[(..., *[None] * self.dims)]


def _normalized(channels: int) -> list[nn.Module]:
    return [group_norm(channels), nn.ReLU()]


def _conv(channels: int, kernel: int, dims: int) -> nn.modules.conv._ConvNd:
    return _CONVOLUTION[dims](channels, channels, kernel, padding=kernel // 2, bias=False)


def convolution(channels: int, *, kernel: int, dims: int = 2) -> nn.Module:
    return nn.Sequential(*_normalized(channels), nearly_zero_(_conv(channels, kernel, dims)))


def two_convolutions(channels: int, dims: int = 2) -> nn.Module:
    return nn.Sequential(
        *_normalized(channels),
        _conv(channels, 3, dims),
        *_normalized(channels),
        nearly_zero_(_conv(channels, 3, dims)),
    )


def depthwise(channels: int, dims: int = 2) -> nn.Module:
    return nn.Sequential(
        *_normalized(channels),
        _CONVOLUTION[dims](channels, channels, 3, padding=1, groups=channels, bias=False),
        nearly_zero_(_conv(channels, 1, dims)),
    )


def bottleneck(channels: int, dims: int = 2) -> nn.Module:
    width = max(8, channels // 4)
    return nn.Sequential(
        group_norm(channels),
        _CONVOLUTION[dims](channels, width, 1, bias=False),
        nn.ReLU(),
        _conv(width, 3, dims),
        nn.ReLU(),
        nearly_zero_(_CONVOLUTION[dims](width, channels, 1, bias=False)),
    )


# --- for sequences, and those without attention also for vectors -----------------------------
#
# In a causal host attention is causal, too: a seed must not let a language model look ahead.


HEADS = 4


def sequence_norm(channels: int) -> nn.Module:
    return Renormalize(nn.LayerNorm(channels))


def low_rank(channels: int, *, rank: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(channels, rank, bias=False),
        nearly_zero_(nn.Linear(rank, channels, bias=False)),
    )


def feed_forward(channels: int, *, expansion: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(channels, expansion * channels),
        nn.GELU(),
        nearly_zero_(nn.Linear(expansion * channels, channels)),
    )


class SequenceAttention(nn.Module):
    """Multi-head self-attention, to earlier positions only if `causal`.

    `distance_bias` is linear in distance with a fixed slope per head (ALiBi, Press et al. 2022).
    """

    slopes: Tensor

    def __init__(self, channels: int, *, causal: bool, distance_bias: bool = False) -> None:
        super().__init__()
        if channels % HEADS:
            raise ConfigError(
                f"an attention seed needs a width that {HEADS} heads divide, got {channels}"
            )
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nearly_zero_(nn.Linear(channels, channels))
        self.causal, self.distance_bias = causal, distance_bias
        slopes = 2.0 ** (-8.0 * torch.arange(1, HEADS + 1) / HEADS)
        self.register_buffer("slopes", slopes[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, channels = x.shape
        heads = self.qkv(x).reshape(batch, length, 3, HEADS, channels // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if self.distance_bias:
            position = torch.ones_like(x[0, :, 0]).cumsum(0)
            distance = position[:, None] - position[None, :]
            if self.causal:
                bias = (-self.slopes * distance).masked_fill(distance < 0, -torch.inf)
            else:
                bias = -self.slopes * distance.abs()
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).reshape(batch, length, channels))


class TransformerBlock(nn.Module):
    """Pre-norm residual attention and 4x GELU perceptron, (B, T, C) -> same; `n_head` divides C."""

    def __init__(self, n_embd: int, n_head: int, dropout: float, *, causal: bool = True) -> None:
        super().__init__()
        self.n_head, self.causal = n_head, causal
        self.ln_1 = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.fc = nn.Linear(n_embd, 4 * n_embd)
        self.out = nn.Linear(4 * n_embd, n_embd)
        self.drop = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).reshape(batch, length, 3, self.n_head, width // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.ln_1(x)))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln_2(x)))))


def head_count(channels: int) -> int:
    """HEADS, or one head for every 64 channels if that is more, or the next smaller divisor."""
    most = max(HEADS, channels // 64)
    return next(heads for heads in range(most, 0, -1) if channels % heads == 0)


class Blocks(nn.Module):
    """`count` more transformer blocks, each nearly the identity at first, without dropout."""

    def __init__(self, channels: int, *, count: int, causal: bool) -> None:
        super().__init__()
        heads = head_count(channels)
        blocks = [TransformerBlock(channels, heads, 0.0, causal=causal) for _ in range(count)]
        for block in blocks:
            nearly_zero_(block.proj)
            nearly_zero_(block.out)
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) - x


# --- branches --------------------------------------------------------------------------------


CONV_WIDTH = 8
POOL = 2
HIDDEN = 32


def cnn_branch(channels: int, outputs: int, *, per_position: bool, dims: int = 2) -> nn.Module:
    return nn.Sequential(
        _CONVOLUTION[dims](channels, CONV_WIDTH, 3, padding=1, bias=False),
        group_norm(CONV_WIDTH),
        nn.ReLU(),
        _POOLING[dims](POOL),
        nn.Flatten(),
        nearly_zero_(nn.Linear(CONV_WIDTH * POOL**dims, outputs)),
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
