"""Checkpoints: directories that appear whole or not at all, and are read only if they are intact.

checkpoints/round-000012/
    manifest.json        format version, and the SHA-256 of the two others
    state.json           everything that is not a tensor
    tensors.safetensors  everything that is

Nothing in them is code, and nothing read from them is a path. A checksum finds damage; it is no
signature, so who can write a file can also give it the checksum that fits.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from esper.leyline import ConfigError
from esper.simic.training.state import TrainState, pack, unpack

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
FOLDER = "checkpoints"
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
KEPT = 2
_NAME = re.compile(r"round-(\d{6,})")
_UNFINISHED = "unfinished-"


class DamagedCheckpointError(ConfigError):
    """A checkpoint that is incomplete, was altered, or is not one."""


class CheckpointWriteError(ConfigError):
    """A checkpoint could not be written; those written before are untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """A state, and how long the files of the run were when it was taken, in bytes."""

    path: Path
    state: TrainState
    files: dict[str, int]


def save_checkpoint(run: Path, state: TrainState, files: Mapping[str, int]) -> Path:
    """Write the checkpoint before round `state.round`; keeps it and the one before.

    Raises CheckpointWriteError, in a sentence, if the disk does not take it.
    """
    folder = run / FOLDER
    final = folder / f"round-{state.round:06d}"
    unfinished = folder / f"{_UNFINISHED}{final.name}"
    tensors, meta = pack(state)
    contents = {
        STATE: _to_json({**meta, "files": dict(files)}),
        TENSORS: save(tensors),
    }
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    contents[MANIFEST] = _to_json({"format": FORMAT_VERSION, "sha256": sums})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_unfinished(folder)
        unfinished.mkdir()
        for name, data in contents.items():
            _write(unfinished / name, data)
        _sync_folder(unfinished)
        if final.exists():
            _discard(final)
        os.rename(unfinished, final)
        _sync_folder(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        left = _checkpoints(run)
        kept = f"{left[0].name} is intact" if left else "there is none before it"
        raise CheckpointWriteError(
            f"the checkpoint {final.name} could not be written: {error.strerror or error}; "
            f"{kept}, so make room and go on with --resume {run}"
        ) from error
    for old in _checkpoints(run)[KEPT:]:
        _discard(old)
    return final


def load_checkpoint(run: Path) -> Checkpoint:
    """The newest intact checkpoint of a run; says so, as a warning, if newer ones are damaged."""
    candidates = _checkpoints(run)
    if not candidates:
        raise ConfigError(f"{run} holds no checkpoint, so there is nothing to go on from or to use")
    refused = []
    for path in candidates:
        try:
            return read_checkpoint(path, run)
        except DamagedCheckpointError as error:
            logger.warning("%s; the one before it is used", error)
            refused.append(str(error))
    raise DamagedCheckpointError(f"no checkpoint of {run} is intact: {'; '.join(refused)}")


def read_checkpoint(path: Path, run: Path | None = None) -> Checkpoint:
    """One checkpoint; raises ConfigError in a sentence if it is damaged, foreign or too new."""
    contents = {name: _read(path, name, run or path) for name in (MANIFEST, STATE, TENSORS)}
    manifest = _from_json(path, MANIFEST, contents[MANIFEST])
    version = manifest.get("format")
    if not isinstance(version, int) or version < 1:
        raise DamagedCheckpointError(f"{path} is not a checkpoint: its format is {version!r}")
    if version != FORMAT_VERSION:
        age = "a newer" if version > FORMAT_VERSION else "an older"
        raise ConfigError(
            f"{path} has format {version}, this program reads {FORMAT_VERSION}; "
            f"use {age} version of esper"
        )
    sums = manifest.get("sha256")
    for name in (STATE, TENSORS):
        found = hashlib.sha256(contents[name]).hexdigest()
        if not isinstance(sums, dict) or sums.get(name) != found:
            raise DamagedCheckpointError(f"{path / name} is damaged: its checksum does not fit")
    meta = _from_json(path, STATE, contents[STATE])
    try:
        state = unpack(load(contents[TENSORS]), meta)
    except (SafetensorError, ConfigError) as error:
        raise DamagedCheckpointError(f"{path} cannot be used: {error}") from error
    return Checkpoint(path, state, _sizes(path, meta))


def is_run(path: str | Path) -> bool:
    """Does the folder hold checkpoints, or is it one?"""
    path = Path(path)
    return (path / MANIFEST).is_file() or bool(_checkpoints(path))


def load_state(path: str | Path) -> TrainState:
    """The newest state of a run, or the state in one of its checkpoints."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return read_checkpoint(path).state
    return load_checkpoint(path).state


def _checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, newest first."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _sizes(path: Path, meta: Mapping[str, Any]) -> dict[str, int]:
    sizes = meta.get("files")
    if not isinstance(sizes, dict) or not all(
        isinstance(size, int) and size >= 0 for size in sizes.values()
    ):
        raise DamagedCheckpointError(f"{path} does not say how long the files of its run were")
    return dict(sizes)


def _read(path: Path, name: str, run: Path) -> bytes:
    file = path / name
    if not file.resolve().is_relative_to(run.resolve()):
        raise DamagedCheckpointError(f"{file} leads out of {run}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _from_json(path: Path, name: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path / name} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{path / name} is damaged: it is not an object")
    return value


def _to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make names in the folder as lasting as the files they name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(path: Path) -> None:
    """First take its name away, so that nobody ever sees half of it."""
    doomed = path.with_name(f"{_UNFINISHED}{path.name}-old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _clear_unfinished(folder: Path) -> None:
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
