"""Reading data files, plain or gzipped, with errors that name the file and the cure."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, cast

from esper.leyline import ConfigError, DataMissingError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class DataFile:
    """One file; `size` in bytes and `sha256` are of its uncompressed contents (it may be .gz)."""

    name: str
    size: int
    sha256: str


def locate(folder: Path, name: str) -> Path | None:
    """The file `name` in `folder`, else `name.gz`, else None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def chunks(path: Path) -> Iterator[bytes]:
    """The contents of a file in pieces, decompressed if it ends in .gz.

    Raises ConfigError for a gzip file that is cut off or not gzip.
    """
    try:
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as stream:
            while piece := stream.read(_CHUNK):
                yield piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is a damaged gzip file ({error})") from None


def read(folder: Path, name: str, beside: Iterable[str]) -> bytes:
    """All bytes of the file `name` (or `name.gz`); `beside` names the whole set for the message."""
    path = locate(folder, name)
    if path is None:
        raise missing_error(folder, f"{name} is missing", f"the files {', '.join(beside)}")
    try:
        return b"".join(chunks(path))
    except ConfigError as error:
        raise ConfigError(f"{error}; {cure(folder)}") from None


def find_text(folder: Path) -> Path | None:
    """The one .txt or .parquet file in `folder`, if any; ConfigError if there are several."""
    found = sorted(path for path in folder.glob("*") if path.suffix in (".txt", ".parquet"))
    if len(found) > 1:
        raise ConfigError(
            f"{folder} has {', '.join(path.name for path in found)}; keep exactly one .txt or "
            ".parquet file, so that it is clear what is read"
        )
    return found[0] if found else None


def verify(folder: Path, files: Iterable[DataFile]) -> tuple[list[str], list[str]]:
    """(names of missing files, one sentence for each file that is not the published one)."""
    missing, damaged = [], []
    for file in files:
        path = locate(folder, file.name)
        if path is None:
            missing.append(file.name)
        elif fault := _fault(path, file):
            damaged.append(fault)
    return missing, damaged


def _fault(path: Path, file: DataFile) -> str:
    digest, size = sha256(), 0
    try:
        for piece in chunks(path):
            digest.update(piece)
            size += len(piece)
            if size > file.size:  # also keeps a gzip bomb from being unpacked
                return f"{path} holds more than the published {file.size} bytes"
    except ConfigError as error:
        return str(error)
    if size != file.size:
        return f"{path} holds {size} bytes, not the published {file.size}"
    if digest.hexdigest() != file.sha256:
        return f"{path} does not have the published SHA-256"
    return ""


def missing_error(folder: Path, what: str, wanted: str) -> DataMissingError:
    """The error for data that is not in `folder`, which bears the name of the data set."""
    return DataMissingError(
        f"data set {folder.name}: {what} in {folder}; `esper data get {folder.name}` fetches it, "
        f"or put {wanted} there (ESPER_DATA names another data folder)"
    )


def cure(folder: Path) -> str:
    """What to do about a damaged file of the data set that `folder` is named after."""
    return f"delete it and run `esper data get {folder.name}`"
