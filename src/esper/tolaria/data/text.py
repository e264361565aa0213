"""Text as bytes: every byte is a token, so no tokenizer is needed. 256 symbols."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from esper.leyline import ConfigError
from esper.tolaria.data.splits import DataSplits, draw_order

VOCAB_SIZE = 256
PARTS = ("train", "val", "test")


def windows(text: bytes, block_size: int, pad: int | None = None) -> Tensor:
    """int64 [N, block_size + 1]: windows that overlap by one byte, so each byte is predicted once.

    A tail of 2 bytes or more that does not fill a window is padded with the symbol `pad`; without
    one it is dropped, as is a tail of one byte, in which there is nothing to predict.
    """
    if block_size < 1:
        raise ConfigError(f"block_size is {block_size}; a window needs at least 1 token")
    tokens = np.frombuffer(text, np.uint8)
    tail = (len(tokens) - 1) % block_size
    if pad is not None and len(tokens) > 1 and tail:
        tokens = np.append(tokens, np.full(block_size - tail, pad, np.uint8))
    if len(tokens) <= block_size:
        return torch.empty((0, block_size + 1), dtype=torch.int64)
    cut = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[::block_size]
    return torch.tensor(cut, dtype=torch.int64)


def next_token_splits(parts: Sequence[Tensor], where: str) -> DataSplits:
    """Inputs, and the next token of each, of three parts [N, block_size + 1] in order of PARTS.

    Both are views of the same memory. Raises ConfigError, naming `where`, if a part is empty.
    """
    for part, rows in zip(PARTS, parts, strict=True):
        if not len(rows):
            raise ConfigError(
                f"{where} is too short: its {part} part does not fill one window of "
                f"{rows.shape[1]} bytes; use more text or a smaller block_size"
            )
    return DataSplits(*(half for rows in parts for half in (rows[:, :-1], rows[:, 1:])))


def split_blocks(text: bytes, block_bytes: int, purpose: str) -> dict[str, list[bytes]]:
    """`text` cut into pieces, listed by part; a piece never holds text of two parts.

    Of every ten consecutive blocks one, drawn, is validation and another test, so that both sample
    the whole text; neighbouring blocks of a part are one piece.
    """
    count = -(-len(text) // block_bytes)
    part_of = []
    for group in range(-(-count // 10)):
        val, test = draw_order(10, purpose, group)[:2]
        part_of += [{val: "val", test: "test"}.get(place, "train") for place in range(10)]
    pieces: dict[str, list[bytes]] = {part: [] for part in PARTS}
    for part, blocks in groupby(range(count), key=lambda block: part_of[block]):
        run = list(blocks)
        pieces[part].append(text[run[0] * block_bytes : (run[-1] + 1) * block_bytes])
    return pieces
