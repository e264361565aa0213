"""Folders that are written atomically, and read only if their checksums match.

`manifest.json` holds the format version and the SHA-256 of the other files. A checksum detects
damage; it is not a signature.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError
from esper.leyline.limits import MAX_JSON, parse_json, read_bytes

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
    raw = _read(path, MANIFEST, within or path, MAX_JSON)
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
        contents[name] = _read(path, name, within or path)
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


def _read(path: Path, name: str, within: Path, most: int | None = None) -> bytes:
    try:
        return read_bytes(_inside(path / name, within), most)
    except ConfigError as error:
        raise DamagedCheckpointError(str(error)) from error


def _inside(file: Path, within: Path) -> Path:
    if not file.resolve().is_relative_to(within.resolve()):
        raise DamagedCheckpointError(f"{file} is outside {within}")
    return file


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
