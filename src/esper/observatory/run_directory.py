"""The run directory: what training writes and every view reads, live or afterwards."""

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from esper.leyline import ConfigError, EpisodeOutcome, shortened
from esper.leyline.events import Event

CONFIG = "config.toml"  # the settings of the run
EVENTS = "events.jsonl"  # what happened, one typed event per line
METRICS = "metrics.jsonl"  # one flat row per environment step, and one per round
OUTCOMES = "outcomes.jsonl"  # one row per episode
ACTIONS = "actions.txt"  # the actions of a run of one episode, as a script that repeats it
TIMINGS = "timings.jsonl"  # seconds per round: all that differs between runs of the same key
SUMMARY = "summary.json"  # the comparison that `esper grow` ends with
PICTURE = "growth.png"  # the growth, drawn
PAGE = "report.html"  # the run on one page
MODEL = "model.pt2"  # the grown network, as a torch.export program
ARMS = "arms"  # a folder: run directories of what the grown network is compared with
CHECKPOINTS = "checkpoints"  # a folder: written by the training itself
BEST_POLICY = "best"  # a folder: the policy that was best on hosts that it does not learn from
GROWN = "grown"  # a folder: the grown network, as `esper.load` reads it
PROFILE = "profile"  # a folder: traces of a round that was looked at closely
EPISODES = "episodes.safetensors"  # what was recorded, to learn from
TRACKED = "tracked"  # a folder: what trackers were told, one folder for each kind
LOCK = ".lock"  # locked, not merely there, while a process writes to the run

# What makes a folder a run, and goes when another run takes its place.
OWN = (
    *(CONFIG, EVENTS, METRICS, OUTCOMES, ACTIONS, TIMINGS, SUMMARY, PICTURE, PAGE, MODEL),
    *(EPISODES, ARMS, CHECKPOINTS, BEST_POLICY, GROWN, PROFILE, TRACKED),
)
FOLDERS = (ARMS, CHECKPOINTS, BEST_POLICY, GROWN, PROFILE, TRACKED)
# Cut back to a checkpoint when a run goes on from it.
HISTORY = (EVENTS, METRICS, OUTCOMES)

SCRIPT_HEADING = "# step  op  module  blueprint  blend"


class RunDirectory:
    """A `RoundRecorder` that writes to a folder, one line at a time.

    Nobody else can open the folder until this one is closed or its process has ended. To open
    it changes nothing in the run: `begin` or `go_on` comes next, and `create` opens and begins.
    Raises ConfigError, in a sentence, if another one is open, or when the disk does not take a
    line. Use it as a context manager, or call `close`.
    """

    def __init__(self, path: Path, *, script: bool = False) -> None:
        """With `script` the actions of environment 0 are written to actions.txt as well."""
        self.path, self.script = path, script
        self._round: dict[str, int] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._lock = lock_folder(path)

    @staticmethod
    def create(
        path: Path,
        config: Mapping[str, Any],
        *,
        overwrite: bool = False,
        since: float | None = None,
        script: bool = False,
    ) -> "RunDirectory":
        """Raises ConfigError if the folder already holds a run, or cannot be written.

        With `overwrite` a run that is there makes room; what no run has left does not, nor does a
        run that has begun `since` (in seconds of `time.time`): whoever asks has not seen it.
        """
        check_free(path, overwrite=overwrite)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
        record = RunDirectory(path, script=script)
        try:
            _refuse_newer(path, since)
            record.begin(config)
        except ConfigError:
            record.close()
            raise
        return record

    @staticmethod
    def is_run(path: Path) -> bool:
        """Has a run begun to write to this folder?"""
        return (path / LOCK).exists() and (path / CONFIG).is_file()

    def begin(self, config: Mapping[str, Any]) -> None:
        """An empty record in the place of whatever was told before."""
        try:
            for name in OWN:
                _remove(self.path / name)
            _replace_text(self.path / CONFIG, to_toml(config))
            self._open_history()
            if self.script:
                self._append(ACTIONS, SCRIPT_HEADING)
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror}") from error

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
        if self.script:
            rows = (row for row in read_rows(path / METRICS) if row.get("env") == 0 and acts(row))
            lines = [SCRIPT_HEADING, *map(script_line, rows)]
            _replace_text(path / ACTIONS, "\n".join(lines) + "\n")
        _replace_text(path / CONFIG, to_toml(config))
        self._open_history()

    def begin_round(self, number: int) -> None:
        self._round = {"round": number}

    def event(self, event: Event) -> None:
        self._write(EVENTS, event.row())

    def metrics(self, row: Mapping[str, Any]) -> None:
        self._write(METRICS, row)
        if self.script and row.get("env") == 0 and acts(row):
            self._append(ACTIONS, script_line(row))

    def outcome(self, outcome: EpisodeOutcome) -> None:
        self._write(OUTCOMES, asdict(outcome))

    def timing(self, row: Mapping[str, Any]) -> None:
        self._write(TIMINGS, row)

    def sync(self) -> dict[str, int]:
        """Lengths of the history files in bytes, once they are safely on disk."""
        for name in HISTORY:
            os.fsync(self._files[name].fileno())
        return {name: os.fstat(self._files[name].fileno()).st_size for name in HISTORY}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.close()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open_history(self) -> None:
        for name in HISTORY:
            self._open(name)

    def _open(self, name: str) -> IO[bytes]:
        # Without a buffer: a row is on its way, or it has failed, before the next thing happens.
        if name not in self._files:
            self._files[name] = (self.path / name).open("ab", buffering=0)
        return self._files[name]

    def _write(self, name: str, row: Mapping[str, Any]) -> None:
        self._append(name, json.dumps({**self._round, **row}, allow_nan=False))

    def _append(self, name: str, text: str) -> None:
        line = memoryview((text + "\n").encode())
        try:
            while line:
                line = line[self._open(name).write(line) :]
        except OSError as error:
            raise _unwritten(self.path, name, error) from error


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raises ConfigError if a new run may not begin in the folder; changes nothing."""
    _check_name(path)
    taken = [name for name in OWN if (path / name).exists()]
    if taken and not (path / LOCK).exists():
        raise ConfigError(f"{path} holds a {taken[0]} that is of no run; choose another folder")
    if taken and not overwrite:
        resume = f", or go on with it (--resume {path})" if CHECKPOINTS in taken else ""
        raise ConfigError(
            f"{path} already holds a run; choose another folder, or overwrite it "
            f"(--overwrite){resume}"
        )


def _check_name(path: Path) -> None:
    """Found here, it costs nothing; found at the end of a run, it costs the run."""
    try:
        path.exists()
        str(path).encode()
    except OSError as error:
        raise ConfigError(f"{shortened(str(path))}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} cannot be the name of a folder: {error}") from error


def _refuse_newer(run: Path, since: float | None) -> None:
    config = run / CONFIG
    if since is not None and config.is_file() and config.stat().st_mtime > since:
        raise ConfigError(
            f"another run has begun in {run} since this command did; choose another folder"
        )


def lock_folder(path: Path, name: str = LOCK) -> IO[bytes]:
    """A lock on the folder until the file is closed, which the kernel does for a killed process.

    The file itself stays: whoever removed it would take it from under another's lock.
    """
    try:
        file = (path / name).open("ab")
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
    try:
        _lock_soon(file)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise ConfigError(
                f"{path} is in use by another run; wait until it ends, or stop it, first"
            ) from error
        raise ConfigError(f"cannot lock {path / name}: {error.strerror}") from error
    return file


def _lock_soon(file: IO[bytes]) -> None:
    """A view that asks whether a run goes on holds the lock for an instant; a run for long."""
    for _ in range(20):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.005)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(path: Path) -> None:
    if path.name in FOLDERS and path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replace_text(path: Path, text: str) -> None:
    """Whoever looks, or kills us, finds the old file or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _unwritten(run: Path, name: str, error: OSError) -> ConfigError:
    cure = (
        f"the checkpoints are intact, so make room and go on with --resume {run}"
        if (run / CHECKPOINTS).is_dir()
        else "the record ends there; make room and start again with --overwrite"
    )
    return ConfigError(f"{run / name} could not be written: {error.strerror}; {cure}")


def write_summary(run: Path, rows: list[dict[str, Any]]) -> None:
    try:
        _replace_text(run / SUMMARY, json.dumps(rows, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise _unwritten(run, SUMMARY, error) from error


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl file; a last line that is still being written is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def acts(row: Mapping[str, Any]) -> bool:
    """Whether a row of metrics is of a step that did more than wait."""
    return row["kind"] == "step" and row["op"] != "WAIT"


def script_line(row: Mapping[str, Any]) -> str:
    """The action of a step as a line of a script for the controller `scripted:FILE`."""
    words = [row["step"], row["op"], row["slot"], row["blueprint"], row["blend"]]
    return "  ".join(str(word) for word in words if word is not None)


def episode_script(run: Path, round_: int, env: int) -> str:
    """The actions of one episode of a run of many rounds, as a script."""
    rows = (row for row in read_rows(run / METRICS) if row["round"] == round_)
    lines = [script_line(row) for row in rows if row.get("env") == env and acts(row)]
    return "\n".join([SCRIPT_HEADING, *lines]) + "\n"


def to_toml(config: Mapping[str, Any]) -> str:
    """A flat mapping as TOML; absent values stand as comments."""
    lines = []
    for key, value in config.items():
        if value is None:
            lines.append(f"# {key} is not set")
        elif value == {}:
            lines.append(f"{key} = {{}}")
        elif isinstance(value, bool):
            lines.append(f"{key} = {str(value).lower()}")
        elif isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            lines.append(f"{key} = {value!r}")
        elif isinstance(value, tuple | list):
            lines.append(f"{key} = {json.dumps(list(value))}")
        else:
            # A JSON string without control characters is a TOML basic string.
            lines.append(f"{key} = {json.dumps(str(value))}")
    return "\n".join(lines) + "\n"
