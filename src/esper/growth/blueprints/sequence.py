"""Residual seeds for (B, T, C), and those without attention also for (B, C).

Each returns the change to add, of the input's shape. Attention is causal, so that a seed never
lets a language model look ahead.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.growth.blueprints.parts import Renormalize, nearly_zero_
from esper.leyline import ConfigError

HEADS = 4


def norm(channels: int) -> nn.Module:
    return Renormalize(nn.LayerNorm(channels))


def _low_rank(channels: int, rank: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(channels, rank, bias=False),
        nearly_zero_(nn.Linear(rank, channels, bias=False)),
    )


def lora(channels: int) -> nn.Module:
    return _low_rank(channels, 8)


def lora_large(channels: int) -> nn.Module:
    return _low_rank(channels, 32)


def _feed_forward(channels: int, expansion: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(channels, expansion * channels),
        nn.GELU(),
        nearly_zero_(nn.Linear(expansion * channels, channels)),
    )


def mlp_small(channels: int) -> nn.Module:
    return _feed_forward(channels, 2)


def mlp(channels: int) -> nn.Module:
    return _feed_forward(channels, 4)


class CausalAttention(nn.Module):
    """Multi-head causal self-attention; with `distance_bias`, far positions count less.

    The bias is linear in distance with a fixed slope per head (ALiBi, Press et al. 2022).
    """

    slopes: Tensor

    def __init__(self, channels: int, *, distance_bias: bool = False) -> None:
        super().__init__()
        if channels % HEADS:
            raise ConfigError(
                f"an attention seed needs a width that {HEADS} heads divide, got {channels}"
            )
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nearly_zero_(nn.Linear(channels, channels))
        self.distance_bias = distance_bias
        slopes = 2.0 ** (-8.0 * torch.arange(1, HEADS + 1) / HEADS)
        self.register_buffer("slopes", slopes[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, channels = x.shape
        heads = self.qkv(x).reshape(batch, length, 3, HEADS, channels // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if self.distance_bias:
            place = torch.ones_like(x[0, :, 0]).cumsum(0)
            distance = place[:, None] - place[None, :]
            bias = (-self.slopes * distance).masked_fill(distance < 0, -torch.inf)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, length, channels))


def attention(channels: int) -> nn.Module:
    return CausalAttention(channels)


def flex_attention(channels: int) -> nn.Module:
    return CausalAttention(channels, distance_bias=True)
