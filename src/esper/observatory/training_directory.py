"""The run directory of a training run: as of any run, but of many rounds, and it can go on.

config.toml      the settings of the run
events.jsonl     what happened, one typed event per line
metrics.jsonl    one flat row per environment step and one per round
outcomes.jsonl   one row per episode
timings.jsonl    seconds per round: all that differs between runs of the same key
checkpoints/     written by the training itself
.lock            locked, not merely there, while a process writes to the run
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from esper.leyline import ConfigError, EpisodeOutcome
from esper.leyline.events import Event
from esper.observatory.run_directory import (
    CONFIG,
    EVENTS,
    METRICS,
    OUTCOMES,
    read_rows,
    to_toml,
)

TIMINGS, CHECKPOINTS, LOCK = "timings.jsonl", "checkpoints", ".lock"
# Files that are cut back to a checkpoint when a run goes on from it.
HISTORY = (EVENTS, METRICS, OUTCOMES)
_OWN = (*HISTORY, TIMINGS, CONFIG)


class TrainingDirectory:
    """A `RoundRecorder` that writes to a folder, one line at a time.

    Nobody else can open the folder until this one is closed or its process has ended. To open
    it changes nothing in the run: `begin` or `go_on` comes next. Raises ConfigError, in a sentence,
    if another one is open, or when the disk does not take a line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._round: dict[str, int] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._lock = _lock(path)

    @staticmethod
    def create(
        path: Path, config: Mapping[str, Any], *, overwrite: bool = False
    ) -> "TrainingDirectory":
        """Raises ConfigError if the folder already holds a run, or cannot be written."""
        if not overwrite and any((path / name).exists() for name in (*_OWN, CHECKPOINTS)):
            raise ConfigError(
                f"{path} already holds a run; choose another folder, overwrite it (--overwrite), "
                f"or go on with it (--resume {path})"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
        record = TrainingDirectory(path)
        try:
            record.begin(config)
        except ConfigError:
            record.close()
            raise
        return record

    def begin(self, config: Mapping[str, Any]) -> None:
        """An empty record in the place of whatever was told before."""
        path = self.path
        try:
            for name in _OWN:
                (path / name).unlink(missing_ok=True)
            if (path / CHECKPOINTS).is_dir():
                shutil.rmtree(path / CHECKPOINTS)
            _replace_text(path / CONFIG, to_toml(config))
            self._open_files()
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}") from error

    def go_on(self, config: Mapping[str, Any], sizes: Mapping[str, int], next_round: int) -> None:
        """Forget all that was told after the checkpoint with these sizes was made."""
        path = self.path
        for name in HISTORY:
            length = (path / name).stat().st_size if (path / name).is_file() else 0
            if name not in sizes or length < sizes[name]:
                raise ConfigError(
                    f"{path / name} is shorter than when the checkpoint was made; "
                    "the record of this run is incomplete, so it cannot go on"
                )
            os.truncate(path / name, sizes[name])
        if (path / TIMINGS).is_file():
            kept = [row for row in read_rows(path / TIMINGS) if row["round"] < next_round]
            text = "".join(json.dumps(row) + "\n" for row in kept)
            _replace_text(path / TIMINGS, text)
        _replace_text(path / CONFIG, to_toml(config))
        self._open_files()

    def _open_files(self) -> None:
        # Without buffers: a row is on its way, or it has failed, before the next thing happens.
        for name in (*HISTORY, TIMINGS):
            self._files[name] = (self.path / name).open("ab", buffering=0)

    def begin_round(self, number: int) -> None:
        self._round = {"round": number}

    def event(self, event: Event) -> None:
        self._write(EVENTS, {"event": type(event).__name__, **asdict(event)})

    def metrics(self, row: Mapping[str, Any]) -> None:
        self._write(METRICS, row)

    def outcome(self, outcome: EpisodeOutcome) -> None:
        self._write(OUTCOMES, asdict(outcome))

    def timing(self, row: Mapping[str, Any]) -> None:
        self._write(TIMINGS, row)

    def _write(self, name: str, row: Mapping[str, Any]) -> None:
        line = memoryview((json.dumps({**self._round, **row}, allow_nan=False) + "\n").encode())
        try:
            while line:
                line = line[self._files[name].write(line) :]
        except OSError as error:
            raise ConfigError(
                f"{self.path / name} could not be written: {error.strerror}; the checkpoints are "
                f"intact, so make room and go on with --resume {self.path}"
            ) from error

    def sync(self) -> dict[str, int]:
        """Lengths of the history files in bytes, once they are safely on disk."""
        for name in HISTORY:
            os.fsync(self._files[name].fileno())
        return {name: os.fstat(self._files[name].fileno()).st_size for name in HISTORY}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.close()

    def __enter__(self) -> "TrainingDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _lock(path: Path) -> IO[bytes]:
    """A lock on the folder until the file is closed, which the kernel does for a killed process.

    The file itself stays: whoever removed it would take it from under another's lock.
    """
    try:
        file = (path / LOCK).open("ab")
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise ConfigError(
                f"{path} is in use by another training; wait until it ends, or stop it, first"
            ) from error
        raise ConfigError(f"cannot lock {path / LOCK}: {error.strerror}") from error
    return file


def _replace_text(path: Path, text: str) -> None:
    """Whoever looks, or kills us, finds the old file or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def episode_script(run: Path, round_: int, env: int) -> str:
    """The actions of one recorded episode, as a script for the controller `scripted:FILE`."""
    lines = ["# step  op  slot  blueprint  blend"]
    for row in read_rows(run / METRICS):
        if (row["kind"], row["round"], row.get("env")) == ("step", round_, env):
            words = [row["step"], row["op"], row["slot"], row["blueprint"], row["blend"]]
            if row["op"] != "WAIT":
                lines.append("  ".join(str(word) for word in words if word is not None))
    return "\n".join(lines) + "\n"
