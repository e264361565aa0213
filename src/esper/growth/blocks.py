"""The block that transformer hosts are made of, and that they grow by."""

import torch.nn.functional as F
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    """Pre-norm attention, to earlier positions only if `causal`, and a 4x GELU perceptron, both
    residual. (B, T, C) -> same; `n_head` divides C."""

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
