"""A small causal transformer language model with a slot after every segment."""

import torch
from torch import Tensor, nn

from esper.growth.blueprints.modules import TransformerBlock
from esper.leyline import ConfigError


class TransformerHost(nn.Module):
    """Token ids (B, T) -> logits (B, T, vocab), T at most `block_size`.

    The output head shares its weight with the token embedding. `n_layer` blocks are divided into
    `num_segments` of equal length, with one slot at the end of each.
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
        num_segments: int = 3,
    ) -> None:
        super().__init__()
        if n_layer % num_segments:
            raise ConfigError(f"{n_layer} layers cannot be divided into {num_segments} segments")
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
        per_segment = n_layer // num_segments
        self.slot_modules = tuple(
            f"blocks.{(i + 1) * per_segment - 1}" for i in range(num_segments)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.block_size:
            raise ConfigError(f"sequence of {length} exceeds the block size {self.block_size}")
        x = self.drop(self.token(tokens) + self.position(self.positions[:length]))
        return self.head(self.ln(self.blocks(x)))
