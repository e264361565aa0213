"""Reads the files of a run while another process writes them.

Every read opens the file anew and reads only what it needs, so it costs the same for ten rows and
for ten million, and a file that was cut, replaced or removed meanwhile needs no special case.
Files are neither mapped (a mapped file that is cut kills its reader) nor followed through links.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from esper.leyline.locks import try_lock

BLOCK = 4096
MAX_LINE = 1 << 20  # bytes of a row
MAX_FILE = 1 << 26  # bytes of a file that is read as a whole
MAX_DAMAGED = 100  # damaged lines in sequence after which the search for a row ends

ROUND_ROW = b'"kind": "round"'  # marks the row that ends a round
ROUND_FIRST = re.compile(rb'\{"round": (\d{1,15}), ')  # how a training run begins its rows
Row = dict[str, Any]
# How files are opened; Windows has only the last flag.
FLAGS = {
    name: getattr(os, name)
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
    if hasattr(os, name)
}
DECODER = json.JSONDecoder(parse_constant=lambda _: None)


class UnreadableError(Exception):
    """A file of a run that cannot be read; the message names the file and the reason."""


def open_regular(path: Path) -> int:
    """A descriptor of a regular file. Raises FileNotFoundError, or UnreadableError for links,
    pipes and devices."""
    try:
        if path.is_symlink() and "O_NOFOLLOW" not in FLAGS:
            raise UnreadableError(f"{path.name} is a link")
        descriptor = os.open(path, sum(FLAGS.values()))
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise UnreadableError(f"{path.name} {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableError(f"{path.name} is not a regular file")
    return descriptor


def read_text(path: Path) -> str:
    """A whole small file. Raises FileNotFoundError or UnreadableError."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise UnreadableError(f"{path.name} is longer than {MAX_FILE >> 20} MB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path.name} is not text") from error


def read_json(path: Path) -> Any:
    try:
        return DECODER.decode(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path.name} is damaged") from error


class JsonLines:
    """The complete rows of a .jsonl file as it was when opened, by byte offset; a context manager.

    Lines that are no rows are skipped and counted in `damaged`. Rows that are cut off meanwhile are
    missing. Raises FileNotFoundError or UnreadableError; `path` None is an empty file.
    """

    def __init__(self, path: Path | None) -> None:
        self.damaged = 0
        self._file = os.open(os.devnull, os.O_RDONLY) if path is None else open_regular(path)
        self.end = self._line_start_before(os.fstat(self._file).st_size)

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def rows(self, begin: int = 0, end: int | None = None) -> Iterator[Row]:
        """Rows whose lines begin at `begin` (the start of a line) or later, and before `end`."""
        offset, rest = begin, b""
        end = self.end if end is None else min(end, self.end)
        while offset < end:
            block = os.pread(self._file, min(1 << 18, end - offset), offset)
            if not block:
                return
            offset += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if (row := self._row(line)) is not None:
                    yield row
            if len(rest) > MAX_LINE:
                rest = b""

    def first_from(self, offset: int) -> tuple[int, Row] | None:
        """(offset, row) of the first valid line that begins at `offset` or later."""
        begin = self._line_start_from(offset)
        for _ in range(MAX_DAMAGED):
            if begin >= self.end:
                return None
            if (row := self._row(self._line(begin))) is not None:
                return begin, row
            begin = self._line_start_from(begin + 1)
        return None

    def last(self) -> Row | None:
        """The last valid row."""
        end = self.end
        for _ in range(MAX_DAMAGED):
            if end == 0:
                return None
            begin = self._line_start_before(end - 1)
            if (row := self._row(self._line(begin))) is not None:
                return row
            end = begin
        return None

    def sample(self, most: int, begin: int = 0, end: int | None = None) -> list[Row]:
        """All rows if there are few, else about `most`, evenly spaced; the last is included."""
        end = self.end if end is None else end
        first = self._line(begin) if begin < end else b""
        if (end - begin) <= most * max(len(first) + 1, 64) * 1.5:
            return list(self.rows(begin, end))
        found: dict[int, Row] = {}
        for i in range(most):
            at = self.first_from(begin + (end - begin) * i // most)
            if at is not None and at[0] < end:
                found[at[0]] = at[1]
        last = self.first_from(self._line_start_before(end - 1))
        if last is not None:
            found[last[0]] = last[1]
        return [found[offset] for offset in sorted(found)]

    def start_of_round(self, number: int, low: int = 0) -> int:
        """The offset of the first row of this round or a later one; the end if there is none.

        Round numbers never decrease in a file. The search begins at the offset `low`.
        """
        high = self.end
        while low < high:
            middle = (low + high) // 2
            begin, round_ = self._round_from(middle)
            if round_ is None or round_ >= number:
                high = middle
            else:
                low = begin + 1
        found = self.first_from(low)
        return self.end if found is None else found[0]

    def _round_from(self, offset: int) -> tuple[int, int | None]:
        """(offset, round) of the first valid line that begins at `offset` or later."""
        begin = self._line_start_from(offset)
        start = ROUND_FIRST.match(os.pread(self._file, 32, begin)) if begin < self.end else None
        if start is not None:
            return begin, int(start[1])
        found = self.first_from(offset)
        return (self.end, None) if found is None else (found[0], integer(found[1], "round") or 0)

    def last_with(self, mark: bytes, begin: int, end: int) -> Row | None:
        """The last row between two line starts whose text contains `mark`."""
        length = 4 * BLOCK
        while True:
            start = max(begin, end - length)
            chunk = os.pread(self._file, end - start, start)
            at = chunk.rfind(mark)
            if at >= 0:
                return self._row(self._line(self._line_start_before(start + at)))
            if start <= begin:
                return None
            length *= 4

    def _row(self, line: bytes) -> Row | None:
        try:
            row = DECODER.decode(line.decode())
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            return row
        self.damaged += 1
        return None

    def _line(self, begin: int) -> bytes:
        length = BLOCK
        while True:
            block = os.pread(self._file, min(length, self.end - begin), begin)
            line, found, _ = block.partition(b"\n")
            if found or len(block) < length or length > MAX_LINE:
                return line
            length *= 4

    def _line_start_from(self, offset: int) -> int:
        """The first line start at `offset` or later."""
        if offset <= 0:
            return 0
        at = offset - 1
        while at < min(self.end, offset + MAX_LINE):
            block = os.pread(self._file, BLOCK, at)
            if not block:
                break
            if (found := block.find(b"\n")) >= 0:
                return at + found + 1
            at += len(block)
        return self.end

    def _line_start_before(self, offset: int) -> int:
        """The last line start at `offset` or earlier."""
        end = offset
        while end > 0:
            begin = max(0, end - BLOCK)
            block = os.pread(self._file, end - begin, begin)
            if (found := block.rfind(b"\n")) >= 0:
                return begin + found + 1
            end = begin
        return 0


def open_rows(path: Path) -> JsonLines:
    """The rows of a file; none if it is missing or unreadable."""
    try:
        return JsonLines(path)
    except (FileNotFoundError, UnreadableError):
        return JsonLines(None)


def number(row: Mapping[str, Any], name: str) -> float | None:
    """The finite number in this column, or None if there is anything else."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -1e300 < value < 1e300 else None


def integer(row: Mapping[str, Any], name: str) -> int | None:
    value = number(row, name)
    return None if value is None else int(value)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock at `path`. To find out, it is requested for an instant."""
    try:
        descriptor = open_regular(path)
    except (FileNotFoundError, UnreadableError):
        return False
    try:
        return not try_lock(descriptor, shared=True)
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(descriptor)
