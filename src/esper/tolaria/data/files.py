"""Reading and verifying data files, plain or gzipped."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, cast

from esper.leyline import ConfigError, DataMissingError

CHUNK = 1 << 20
SEPARATOR = b"<|endoftext|>"  # between the documents of a text file


@dataclass(frozen=True)
class DataFile:
    """One published file; `sha256` is of its uncompressed contents."""

    name: str
    sha256: str


def locate(folder: Path, name: str) -> Path | None:
    """The file `name` in `folder`, else `name.gz`, else None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_chunks(path: Path) -> Iterator[bytes]:
    """The contents of a file, decompressed if it ends in .gz; ConfigError for a damaged one."""
    try:
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as stream:
            while chunk := stream.read(CHUNK):
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is a damaged gzip file ({error}); {cure(path.parent)}") from None


def read(folder: Path, name: str) -> bytes:
    """All bytes of the file `name` (or `name.gz`) in the folder of a data set.

    Raises DataMissingError if it is not there, ConfigError if it is damaged.
    """
    path = locate(folder, name)
    if path is None:
        raise DataMissingError(
            f"data set {folder.name}: {name} is missing in {folder}; run `esper data get "
            f"{folder.name}`, put the file there, or set ESPER_DATA to another data folder"
        )
    return b"".join(read_chunks(path))


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
    digest = sha256()
    try:
        for chunk in read_chunks(path):
            digest.update(chunk)
    except ConfigError as error:
        return str(error)
    if digest.hexdigest() == file.sha256:
        return ""
    return f"{path} has another SHA-256 than the published file; {cure(path.parent)}"


def cure(folder: Path) -> str:
    """What to do about a damaged file of the data set that `folder` is named after."""
    return f"delete it and run `esper data get {folder.name}`"
