"""Text data sets as bytes: every byte is a token, so no tokenizer is needed. 256 symbols.

pydocs     the help texts of the Python language, embedded in CPython. They differ between
           versions of CPython: compare results of one version only.
linuxdocs  the documentation of the Linux kernel, 33 MB in 7,746 documents.
"""

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.leyline import ConfigError
from esper.tolaria.data.catalogue import missing_error
from esper.tolaria.data.fetch import SEPARATOR, read
from esper.tolaria.data.splits import DataSplits, draw_order

SPLITS = ("train", "val", "test")
PYDOCS_SPLIT_BYTES = 4096
EOS = 0  # the byte after each document, and the padding
LINUXDOCS_FILE = "linux-doc-6.1.txt"
LINUXDOCS_BLOCK_SIZE = 128
# Paragraphs of more bytes are kept once.
LONG_PARAGRAPH = 200


def load_pydocs(root: Path | None = None, block_size: int = 128) -> DataSplits:
    """Byte tokens [N, block_size] and the next byte of each; `root` is not used.

    Of every ten blocks of 4,096 bytes one is validation and one test; no window spans two splits.
    Raises DataMissingError if this Python comes without its help texts.
    """
    runs = split_blocks(pydocs_text(), PYDOCS_SPLIT_BYTES, "pydocs")
    splits = [torch.cat([windows(run, block_size) for run in runs[name]]) for name in SPLITS]
    return _next_token_splits(splits, where="pydocs")


def pydocs_text() -> bytes:
    """All topics in order of their names, each paragraph only at its first occurrence.

    The topics quote each other: with the repeats, half of the validation text would also be in the
    training text.
    """
    if find_spec("pydoc_data") is None:
        raise missing_error("pydocs")
    from pydoc_data.topics import topics

    first: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            first.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(first.values()).encode()


def load_documents(
    root: Path,
    name: str = "linuxdocs",
    file: str = LINUXDOCS_FILE,
    block_size: int = LINUXDOCS_BLOCK_SIZE,
    max_bytes: int = 20_000_000,
    val_bytes: int = 65_536,
    test_bytes: int = 131_072,
) -> DataSplits:
    """Byte tokens [N, block_size] and the next byte of each, from the file `root/name/file`, which
    has a line `<|endoftext|>` between documents.

    A paragraph of more than 200 bytes that occurs more than once is kept at its first occurrence
    only. Documents are in a random order that is always the same; the first ones are validation,
    the next ones test, all others training, each split up to its number of bytes. Raises
    DataMissingError without the file.
    """
    documents = read(root / name, file).split(b"\n" + SEPARATOR + b"\n")
    documents = _without_repeats(documents)
    coming = (documents[i] + bytes([EOS]) for i in draw_order(len(documents), name))
    sizes = {"val": val_bytes, "test": test_bytes, "train": max_bytes}
    texts = {split: _take(coming, size) for split, size in sizes.items()}
    splits = [windows(texts[split], block_size, pad=EOS) for split in SPLITS]
    return _next_token_splits(splits, where=file)


def _without_repeats(documents: Sequence[bytes]) -> list[bytes]:
    seen: set[bytes] = set()
    kept = []
    for document in documents:
        paragraphs = []
        for paragraph in re.split(rb"\n\s*\n", document):
            words = b" ".join(paragraph.split())
            if len(words) <= LONG_PARAGRAPH or words not in seen:
                paragraphs.append(paragraph)
                seen.add(words)
        kept.append(b"\n\n".join(paragraphs))
    return [document for document in kept if document.strip()]


def _take(documents: Iterator[bytes], size: int) -> bytes:
    """The next documents, up to `size` bytes; the rest of the last one is left out."""
    text = bytearray()
    while len(text) < size and (document := next(documents, None)) is not None:
        text += document
    return bytes(text[:size])


def windows(text: bytes, block_size: int, pad: int | None = None) -> Tensor:
    """int64 [N, block_size + 1]: windows that overlap by one byte, so each byte is predicted once.

    An incomplete last window of 2 bytes or more is padded with the symbol `pad`, or dropped if that
    is None.
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


def split_blocks(text: bytes, block_bytes: int, purpose: str) -> dict[str, list[bytes]]:
    """`text` cut into blocks; neighbouring blocks of one split are joined to a run.

    Of every ten consecutive blocks a random one is validation and another test, so that both sample
    the whole text.
    """
    count = -(-len(text) // block_bytes)
    split_of = []
    for group in range(-(-count // 10)):
        val, test = draw_order(10, purpose, group)[:2]
        split_of += [{val: "val", test: "test"}.get(place, "train") for place in range(10)]
    runs: dict[str, list[bytes]] = {name: [] for name in SPLITS}
    for name, blocks in groupby(range(count), key=lambda block: split_of[block]):
        run = list(blocks)
        runs[name].append(text[run[0] * block_bytes : (run[-1] + 1) * block_bytes])
    return runs


def _next_token_splits(splits: Sequence[Tensor], where: str) -> DataSplits:
    """Inputs and next tokens of three tensors [N, block_size + 1]; both are views of one memory."""
    for name, rows in zip(SPLITS, splits, strict=True):
        if not len(rows):
            raise ConfigError(
                f"{where} is too short: its {name} split does not fill one window of "
                f"{rows.shape[1]} bytes; use more text or a smaller block_size"
            )
    return DataSplits(*(half for rows in splits for half in (rows[:, :-1], rows[:, 1:])))
