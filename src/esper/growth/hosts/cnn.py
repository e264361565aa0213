"""A small convolutional classifier with a slot after every block."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.growth.blueprints.modules import group_norm
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
            raise ConfigError(f"every block of a CNNHost needs a channel, got {tuple(widths)}")
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
