"""tinystories: short stories for children, from one .txt or .parquet file in the data folder.

Tokens are bytes (256 symbols), not those of the GPT-2 tokenizer, which cannot be assumed offline:
losses per token are not comparable with those published for TinyStories.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from esper.leyline import ConfigError, DataMissingError
from esper.tolaria.data.catalogue import CATALOGUE
from esper.tolaria.data.files import find_text
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.data.text import next_token_splits, windows

BLOCK_SIZE = 256
SEPARATOR = b"<|endoftext|>"  # between stories in the published .txt files
EOS = 0  # the byte after each story, and the padding
MAX_BYTES = 20_000_000
COLUMN = "text"
CURE_PARQUET = 'pip install "esper-grow[parquet]"'


def load(root: Path, block_size: int = BLOCK_SIZE, max_bytes: int = MAX_BYTES) -> DataSplits:
    """Byte tokens [N, block_size] and the next byte of each, from the file in `root/tinystories`.

    Reads whole stories up to `max_bytes` of text in the order of the file (tokens take 8 bytes of
    memory each), drops repeated ones, and takes the first 90 % for training, then 5 % each for
    validation and test. The stories of a part are one stream, with a zero byte after each, cut into
    windows; only the last one of a part is padded. Raises DataMissingError without the file,
    ConfigError for more than one file or a damaged one.
    """
    path = find_text(root / "tinystories")
    if path is None:
        how_to_get = CATALOGUE["tinystories"].how_to_get
        raise DataMissingError(f"data set tinystories is not in {root}: {how_to_get}")
    read = _parquet_stories if path.suffix == ".parquet" else _txt_stories
    stories = list(dict.fromkeys(_up_to(read(path), max_bytes)))
    if len(stories) < 3:
        raise ConfigError(
            f"{path} gives {len(stories)} different stories within {max_bytes} bytes, and three "
            f"are the least; a .txt file has {SEPARATOR.decode()} between stories"
        )
    held_out = max(1, len(stories) // 20)
    ends = [0, len(stories) - 2 * held_out, len(stories) - held_out, len(stories)]
    parts = [
        windows(b"".join(story + bytes([EOS]) for story in stories[start:end]), block_size, pad=EOS)
        for start, end in pairwise(ends)
    ]
    return next_token_splits(parts, where=str(path))


def _up_to(stories: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    total = 0
    for story in stories:
        total += len(story)
        if total > max_bytes:
            return
        if story:
            yield story


def _txt_stories(path: Path) -> Iterator[bytes]:
    """The text between separators, with \n for every end of line."""
    story: list[bytes] = []
    with path.open("rb") as stream:
        for line in stream:
            last, *begun = line.rstrip(b"\r\n").split(SEPARATOR)
            story.append(last)
            for first in begun:
                yield b"\n".join(story).strip()
                story = [first]
    yield b"\n".join(story).strip()


def _parquet_stories(path: Path) -> Iterator[bytes]:
    """The rows of the column `text`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise DataMissingError(f"{path} needs pyarrow to be read: {CURE_PARQUET}") from None

    try:
        table = parquet.ParquetFile(path)
        if COLUMN not in table.schema_arrow.names:
            raise ConfigError(
                f"{path} has the columns {', '.join(table.schema_arrow.names)}, not '{COLUMN}'"
            )
        for batch in table.iter_batches(columns=[COLUMN]):
            yield from ((story or "").strip().encode() for story in batch.column(0).to_pylist())
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"{path} is not a readable Parquet file ({error}); put a whole one there"
        ) from None
