"""Reads the files of a run while another process writes them.

Every read opens the file anew and reads only what it needs, so it costs the same for ten rows and
for ten million, and a file that was cut, replaced or removed meanwhile needs no special case.
Files are neither mapped (a mapped file that is cut kills its reader) nor followed through links.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError
from esper.leyline.files import MAX_JSON, MAX_LINE, MAX_TEXT, parse_json, parse_toml, try_lock

BLOCK = 4096
MAX_DAMAGED = 100  # damaged lines in sequence after which the search for a row ends
# What one opening of a file may cost, in bytes that are read. Parsing takes longer than reading.
MAX_COST, PARSING = 1 << 29, 8

ROUND_ROW = b'"kind": "round"'  # marks the row that ends a round
ROUND_FIRST = re.compile(rb'\{"round": (\d{1,15}), ')  # how a training run begins its rows
Row = dict[str, Any]
# How files are opened; Windows has only the last flag.
FLAGS = {
    name: getattr(os, name)
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
    if hasattr(os, name)
}
EXACT = 2**53  # a browser rounds larger integers


class UnreadableError(ConfigError):
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


def read_text(path: Path, most: int = MAX_TEXT) -> str:
    """A whole file. Raises FileNotFoundError or UnreadableError."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UnreadableError(f"{path.name} is longer than {most:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path.name} is not text") from error


def read_json(path: Path) -> Any:
    """A whole JSON file. Raises FileNotFoundError or UnreadableError."""
    try:
        return parse_json(read_text(path, MAX_JSON))
    except ValueError as error:
        raise UnreadableError(f"{path.name} is damaged") from error


def read_toml(path: Path) -> dict[str, Any]:
    """A whole TOML file. Raises FileNotFoundError or UnreadableError."""
    try:
        return parse_toml(read_text(path))
    except ValueError as error:
        raise UnreadableError(f"{path.name} is damaged") from error


class JsonLines:
    """The complete rows of a .jsonl file as it was when opened, by byte offset; a context manager.

    Lines that are no rows, or longer than MAX_LINE, are skipped and counted in `damaged`. Rows that
    are cut off meanwhile are missing, and so are all rows once MAX_COST is spent. Raises
    FileNotFoundError or UnreadableError; `path` None is an empty file.
    """

    def __init__(self, path: Path | None) -> None:
        self.damaged, self._left = 0, MAX_COST
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
            block = self._read(min(1 << 18, end - offset), offset)
            if not block:
                return
            offset += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if (row := self._row(line)) is not None:
                    yield row
            if len(rest) > MAX_LINE:
                rest = b""
                self.damaged += 1

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
        searched = begin  # where the search for the next row begins
        for i in range(most):
            offset = begin + (end - begin) * i // most
            if offset < searched:
                continue
            at = self.first_from(offset)
            searched = offset + MAX_LINE if at is None else at[0] + 1
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
        start = ROUND_FIRST.match(self._read(32, begin)) if begin < self.end else None
        if start is not None:
            return begin, int(start[1])
        found = self.first_from(offset)
        return (self.end, None) if found is None else (found[0], integer(found[1], "round") or 0)

    def last_with(self, mark: bytes, begin: int, end: int) -> Row | None:
        """The last row between two line starts whose text contains `mark`; it is not searched for
        in more than some MB."""
        length = 4 * BLOCK
        while True:
            start = max(begin, end - length)
            chunk = self._read(end - start, start)
            at = chunk.rfind(mark)
            if at >= 0:
                return self._row(self._line(self._line_start_before(start + at)))
            if start <= begin or length > MAX_JSON:
                return None
            length *= 4

    def _read(self, length: int, offset: int) -> bytes:
        """As from a file that ends once MAX_COST is spent."""
        if self._left <= 0:
            return b""
        block = os.pread(self._file, min(length, self._left), offset)
        self._left -= len(block)
        if self._left <= 0:
            self.damaged += 1
        return block

    def _row(self, line: bytes) -> Row | None:
        self._left -= PARSING * len(line)
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            return row
        self.damaged += 1
        return None

    def _line(self, begin: int) -> bytes:
        """The line that begins here; empty, which is no row, if it is too long."""
        length = BLOCK
        while length <= MAX_LINE:
            block = self._read(min(length, self.end - begin), begin)
            line, found, _ = block.partition(b"\n")
            if found or len(block) < length:
                return line
            length *= 4
        return b""

    def _line_start_from(self, offset: int) -> int:
        """The first line start at `offset` or later; the end if a line is too long."""
        if offset <= 0:
            return 0
        at = offset - 1
        while at < min(self.end, offset + MAX_LINE):
            block = self._read(BLOCK, at)
            if not block:
                break
            if (found := block.find(b"\n")) >= 0:
                return at + found + 1
            at += len(block)
        return self.end

    def _line_start_before(self, offset: int) -> int:
        """The last line start at `offset` or earlier; 0 if a line is too long."""
        end = offset
        while end > max(0, offset - MAX_LINE):
            begin = max(0, end - BLOCK)
            block = self._read(end - begin, begin)
            if (found := block.rfind(b"\n")) >= 0:
                return begin + found + 1
            end = begin
        self.damaged += end > 0
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
    if not -1e300 < value < 1e300:
        return None
    return value if abs(value) <= EXACT else float(value)


def integer(row: Mapping[str, Any], name: str) -> int | None:
    value = number(row, name)
    return None if value is None or abs(value) > EXACT else int(value)


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
