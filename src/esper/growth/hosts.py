"""Hosts of the built-in tasks: small networks with their slots, as dotted module names, in
`slot_modules`. Any nn.Module can be a host."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.growth.blueprints.modules import TransformerBlock, group_norm
from esper.leyline import ConfigError

# Images of at least this size are faster with channels last, smaller ones slower.
CHANNELS_LAST_PIXELS = 32 * 32


class CNNHost(nn.Module):
    """(B, in_channels, H, W) -> (B, num_classes).

    `n_blocks` blocks of convolution, GroupNorm and ReLU, the i-th `base_channels * 2**i` wide, or
    one block for each of `widths`. The first `pool_layers` of them (all if None) halve height and
    width. One slot per block. Features of large images are channels last.
    """

    def __init__(
        self,
        num_classes: int = 10,
        n_blocks: int = 3,
        base_channels: int = 32,
        pool_layers: int | None = None,
        kernel_size: int = 3,
        in_channels: int = 3,
        widths: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if widths is None:
            widths = [base_channels * 2**i for i in range(n_blocks)]
        if len(widths) < 2:
            raise ConfigError(f"a CNNHost needs at least 2 blocks, got {len(widths)}")
        if min(widths) < 1:
            raise ConfigError(
                f"every block of a CNNHost needs at least one channel, got {tuple(widths)}"
            )
        pools = len(widths) if pool_layers is None else pool_layers
        self.blocks = nn.Sequential()
        width = in_channels
        for i, out in enumerate(widths):
            layers: list[nn.Module] = [
                nn.Conv2d(width, out, kernel_size, padding=kernel_size // 2, bias=False),
                group_norm(out),
            ]
            # Before the ReLU, which is then cheaper: the two commute exactly.
            if i < pools:
                layers.append(nn.MaxPool2d(2))
            layers.append(nn.ReLU())
            self.blocks.append(nn.Sequential(*layers))
            width = out
        self.head = nn.Linear(width, num_classes)
        self.slot_modules = tuple(f"blocks.{i}" for i in range(len(widths)))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] * x.shape[3] >= CHANNELS_LAST_PIXELS:
            x = x.contiguous(memory_format=torch.channels_last)
        return self.head(self.blocks(x).mean(dim=(2, 3)))


class MLPHost(nn.Module):
    """(B, ...) flattened to (B, in_features) -> (B, num_classes). One slot per hidden layer."""

    def __init__(
        self, in_features: int, num_classes: int = 10, hidden: int = 32, n_layers: int = 2
    ) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.blocks = nn.Sequential()
        width = in_features
        for _ in range(n_layers):
            self.blocks.append(
                nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU())
            )
            width = hidden
        self.head = nn.Linear(width, num_classes)
        self.slot_modules = tuple(f"blocks.{i}" for i in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.flatten(x)))


class TransformerHost(nn.Module):
    """Token ids (B, T) -> logits (B, T, vocab), T at most `block_size`.

    The output head shares its weight with the token embedding. One slot per block.
    """

    positions: Tensor
    causal = True

    def __init__(
        self,
        vocab: int = 50257,
        n_embd: int = 384,
        n_head: int = 6,
        n_layer: int = 6,
        block_size: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if n_embd % n_head:
            raise ConfigError(f"{n_head} heads do not divide a width of {n_embd}")
        self.block_size = block_size
        self.token = nn.Embedding(vocab, n_embd)
        self.position = nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(n_embd, n_head, dropout) for _ in range(n_layer))
        )
        self.ln = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab, bias=False)
        self.head.weight = self.token.weight
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        self.register_buffer("positions", torch.arange(block_size), persistent=False)
        self.slot_modules = tuple(f"blocks.{i}" for i in range(n_layer))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.block_size:
            raise ConfigError(f"sequence of {length} exceeds the block size {self.block_size}")
        x = self.drop(self.token(tokens) + self.position(self.positions[:length]))
        return self.head(self.ln(self.blocks(x)))
