"""The run directory of a training run: as of any run, but of many rounds, and it can go on.

config.toml      the settings of the run
events.jsonl     what happened, one typed event per line
metrics.jsonl    one flat row per environment step and one per round
outcomes.jsonl   one row per episode
timings.jsonl    seconds per round: all that differs between runs of the same seed
checkpoints/     written by the training itself
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

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

TIMINGS, CHECKPOINTS = "timings.jsonl", "checkpoints"
# Files that are cut back to a checkpoint when a run goes on from it.
HISTORY = (EVENTS, METRICS, OUTCOMES)
_OWN = (*HISTORY, TIMINGS, CONFIG)


class TrainingDirectory:
    """A `RoundRecorder` that writes to a folder, one line at a time.

    Raises ConfigError, in a sentence, when the disk does not take a line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._round: dict[str, int] = {}
        # Without buffers: a row is on its way, or it has failed, before the next thing happens.
        self._files = {name: (path / name).open("ab", buffering=0) for name in (*HISTORY, TIMINGS)}

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
            for name in _OWN:
                (path / name).unlink(missing_ok=True)
            if (path / CHECKPOINTS).is_dir():
                shutil.rmtree(path / CHECKPOINTS)
            _replace_text(path / CONFIG, to_toml(config))
            return TrainingDirectory(path)
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}") from error

    @staticmethod
    def resume(
        path: Path, config: Mapping[str, Any], sizes: Mapping[str, int], next_round: int
    ) -> "TrainingDirectory":
        """Forget all that was told after the checkpoint with these sizes was made."""
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
        return TrainingDirectory(path)

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

    def __enter__(self) -> "TrainingDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
