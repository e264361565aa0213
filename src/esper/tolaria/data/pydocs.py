"""pydocs: the help texts of the Python language, embedded in CPython, as bytes.

The text differs between versions of CPython, so compare results of one version only; `describe`
gives the length and checksum to record beside a result.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from esper.leyline import DataMissingError
from esper.tolaria.data.catalogue import CATALOGUE
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.data.text import PARTS, next_token_splits, split_blocks, windows

BLOCK_SIZE = 128
SPLIT_BYTES = 4096


@dataclass(frozen=True)
class TextFacts:
    """What identifies a text: its length in bytes and its SHA-256."""

    length: int
    sha256: str


def load(root: Path | None = None, block_size: int = BLOCK_SIZE) -> DataSplits:
    """Byte tokens [N, block_size] of 256 symbols, and the next byte of each.

    Of every ten blocks of 4,096 bytes one is validation and one test; no window spans two parts.
    `root` is not used. Raises DataMissingError if this Python comes without its help texts.
    """
    pieces = split_blocks(text(), SPLIT_BYTES, "pydocs")
    parts = [torch.cat([windows(piece, block_size) for piece in pieces[part]]) for part in PARTS]
    return next_token_splits(parts, where="pydocs")


def describe() -> TextFacts:
    """Length and checksum of the text that `load` splits."""
    whole = text()
    return TextFacts(len(whole), sha256(whole).hexdigest())


def text() -> bytes:
    """All topics in order of their names, each paragraph only where it first occurs.

    The topics quote each other at length: with repeats left in, half of the validation text stands
    word for word in the training text, and memory would pass for skill.
    """
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise DataMissingError(f"data set pydocs: {CATALOGUE['pydocs'].how_to_get}") from None

    first: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            first.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(first.values()).encode()
