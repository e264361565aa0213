"""Checkpoints of a training run: sealed folders; the newest intact one is read.

checkpoints/round-000012/
    manifest.json        format version, and the SHA-256 of the other two files
    state.json           everything but tensors
    tensors.safetensors  tensors

Loading a checkpoint runs no code from it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from esper.leyline import ConfigError
from esper.leyline.sealed import (
    MANIFEST,
    DamagedCheckpointError,
    clear_unfinished,
    discard,
    from_json,
    read_sealed,
    sealed_series,
    to_json,
    write_sealed,
)
from esper.simic.training.policy_folder import is_policy, read_policy
from esper.simic.training.state import TrainState, pack, unpack
from esper.simic.training.versions import OLDEST, VERSION, upgraded

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
STATE, TENSORS = "state.json", "tensors.safetensors"
KEPT = 2


class CheckpointWriteError(ConfigError):
    """A checkpoint could not be written; earlier ones are untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """A state, and the size of each file of the run at that time, in bytes."""

    path: Path
    state: TrainState
    files: dict[str, int]


def save_checkpoint(run: Path, state: TrainState, files: Mapping[str, int]) -> Path:
    """Write the checkpoint before round `state.round`, and remove all but it and the one before.

    Raises CheckpointWriteError if it cannot be written.
    """
    final = run / FOLDER / f"round-{state.round:06d}"
    tensors, meta = pack(state)
    contents = {STATE: to_json({**meta, "files": dict(files)}), TENSORS: save(tensors)}
    clear_unfinished(final.parent)
    try:
        write_sealed(final, contents, VERSION)
    except OSError as error:
        left = _checkpoints(run)
        kept = f"{left[0].name} is intact" if left else "there is no earlier one"
        raise CheckpointWriteError(
            f"the checkpoint {final.name} could not be written: {error.strerror or error}; "
            f"{kept}; free disk space and continue with --resume {run}"
        ) from error
    for old in _checkpoints(run)[KEPT:]:
        discard(old)
    return final


def load_checkpoint(run: Path) -> Checkpoint:
    """The newest intact checkpoint of a run; logs a warning for each newer one that is damaged."""
    candidates = _checkpoints(run)
    if not candidates:
        raise ConfigError(f"{run} holds no checkpoint; name the folder of a training run")
    refused = []
    for path in candidates:
        try:
            return read_checkpoint(path, run)
        except DamagedCheckpointError as error:
            logger.warning("%s; the one before it is used", error)
            refused.append(str(error))
    raise DamagedCheckpointError(f"no checkpoint of {run} is intact: {'; '.join(refused)}")


def read_checkpoint(path: Path, run: Path | None = None) -> Checkpoint:
    """One checkpoint, upgraded if an older version of Esper has written it. Raises ConfigError if
    it is damaged, of a format that cannot be read, or not a checkpoint."""
    contents = read_sealed(path, (STATE, TENSORS), VERSION, run, OLDEST)
    meta = from_json(path / STATE, contents[STATE])
    version = from_json(path / MANIFEST, contents[MANIFEST])["format"]
    try:
        state = unpack(load(contents[TENSORS]), upgraded(meta, version))
    except (SafetensorError, ConfigError) as error:
        raise DamagedCheckpointError(f"{path} cannot be used: {error}") from error
    return Checkpoint(path, state, _file_sizes(path, meta))


def is_run(path: str | Path) -> bool:
    """Whether the folder holds checkpoints or is one."""
    path = Path(path)
    return (path / MANIFEST).is_file() or bool(_checkpoints(path))


def load_state(path: str | Path) -> TrainState:
    """The newest state of a run, the state in one of its checkpoints, or an exported policy."""
    path = Path(path)
    if is_policy(path):
        return read_policy(path)
    if (path / MANIFEST).is_file():
        return read_checkpoint(path).state
    return load_checkpoint(path).state


def _checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, newest first."""
    return sealed_series(run / FOLDER, "round")


def _file_sizes(path: Path, meta: Mapping[str, Any]) -> dict[str, int]:
    sizes = meta.get("files")
    if not isinstance(sizes, dict) or not all(
        isinstance(size, int) and size >= 0 for size in sizes.values()
    ):
        raise DamagedCheckpointError(f"{path} lacks the sizes of the files of its run")
    return dict(sizes)
