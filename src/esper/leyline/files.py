"""Files: read within limits because others may have written them, locked between processes, and
folders that appear complete or not at all."""

import hashlib
import json
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

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
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for values in inside for inner in values if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def try_lock(file: IO[bytes] | int, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock. Raises OSError
    on a file system without locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: IO[bytes]) -> None:
    """Lock an open file until it is closed, as soon as no other process holds the lock."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)


MANIFEST = "manifest.json"
_UNFINISHED = "unfinished-"


class DamagedCheckpointError(ConfigError):
    """A sealed folder that is incomplete, modified, or not a sealed folder."""


def write_sealed(final: Path, contents: Mapping[str, bytes], version: int) -> None:
    """Write files as the folder `final`, replacing an older one. Raises OSError, and keeps the
    older one, if the files cannot be written."""
    unfinished = final.with_name(f"{_UNFINISHED}{final.name}")
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    manifest = to_json({"format": version, "sha256": sums})
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for name, data in {**contents, MANIFEST: manifest}.items():
            _write(unfinished / name, data)
        _sync_folder(unfinished)
        if final.exists():
            discard(final)
        os.rename(unfinished, final)
        _sync_folder(final.parent)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def read_sealed(
    path: Path,
    names: Sequence[str],
    version: int,
    within: Path | None = None,
    oldest: int | None = None,
) -> dict[str, bytes]:
    """The files of a folder inside `within`, with its manifest. Raises ConfigError if they are
    damaged, outside, or of another format: newer than `version`, or older than `oldest` (by default
    `version`)."""
    raw = _read(path / MANIFEST, within or path, MAX_JSON)
    manifest, contents = from_json(path / MANIFEST, raw), {MANIFEST: raw}
    found = manifest.get("format")
    if not isinstance(found, int) or found < 1:
        raise DamagedCheckpointError(f"{path} is not a checkpoint: its format is {found!r}")
    if not (oldest or version) <= found <= version:
        age = "a newer" if found > version else "an older"
        raise ConfigError(
            f"{path} has format {found}, this program reads {version}; use {age} version of esper"
        )
    sums = manifest.get("sha256")
    for name in names:
        contents[name] = _read(path / name, within or path)
        found = hashlib.sha256(contents[name]).hexdigest()
        if not isinstance(sums, dict) or sums.get(name) != found:
            raise DamagedCheckpointError(f"{path / name} is damaged: its checksum is wrong")
    return contents


def sealed_series(folder: Path, word: str) -> list[Path]:
    """The finished folders `word`-000012 in a folder, newest first."""
    if not folder.is_dir():
        return []
    name = re.compile(rf"{word}-(\d{{6,}})")
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := name.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def clear_unfinished(folder: Path) -> None:
    """Remove the unfinished folders of killed writers."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Rename it first, so that no reader sees a half-deleted folder."""
    doomed = path.with_name(f"{_UNFINISHED}{path.name}-old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def from_json(file: Path, data: bytes) -> dict[str, Any]:
    try:
        value = parse_json(data)
    except ValueError as error:
        raise DamagedCheckpointError(f"{file} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{file} is damaged: it is not an object")
    return value


def _read(file: Path, within: Path, most: int | None = None) -> bytes:
    if not file.resolve().is_relative_to(within.resolve()):
        raise DamagedCheckpointError(f"{file} is outside {within}")
    try:
        return read_bytes(file, most)
    except ConfigError as error:
        raise DamagedCheckpointError(str(error)) from error


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Sync the folder itself, so that the names of files are on disk, too."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
