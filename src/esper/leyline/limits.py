"""Files that others may have written are read within limits: of size and of nesting."""

import json
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError

MAX_TEXT = 1 << 18  # bytes of a card, a script or a file of settings
MAX_JSON = 1 << 26  # bytes of a JSON file
MAX_LINE = 1 << 20  # bytes of a row
MAX_WEIGHTS = 1 << 28  # bytes of the weights of a policy
MAX_DEPTH = 100  # of lists and tables in each other

# Windows has none of these flags. A pipe would block until somebody writes to it.
READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def read_bytes(path: Path, most: int | None) -> bytes:
    """A whole regular file. Raises ConfigError if it cannot be read or is longer than `most`."""
    try:
        with open(os.open(path, READ), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path} cannot be read: it is not a file")
            data = file.read(-1 if most is None else most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if most is not None and len(data) > most:
        raise ConfigError(f"{path} cannot be read: it is longer than {most:,} bytes")
    return data


def read_text(path: Path, most: int = MAX_TEXT) -> str:
    """A whole text file. Raises ConfigError, also if it is not UTF-8."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is not UTF-8 text") from error


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError for anything but JSON, numbers of thousands of digits, and deep nesting."""
    try:
        value = _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # Counting brackets is fast; only a text with many of them can be too deep.
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_DEPTH:  # type: ignore[arg-type]
        check_depth(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError for anything but TOML, numbers of thousands of digits, and deep nesting."""
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises ValueError for lists and dictionaries that are nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, dict | list):
                yield each
