"""The run directory: training writes it, every view reads it, during a run or afterwards."""

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Any

from esper.leyline import ConfigError, EpisodeOutcome, shortened
from esper.leyline.events import Event
from esper.leyline.files import MAX_LINE, parse_json, try_lock

CONFIG = "config.toml"  # the settings of the run
EVENTS = "events.jsonl"  # one typed event per line
METRICS = "metrics.jsonl"  # one flat row per environment step, and one per round
OUTCOMES = "outcomes.jsonl"  # one row per episode
ACTIONS = "actions.txt"  # the actions of a run of one episode, as a script that repeats it
TIMINGS = "timings.jsonl"  # seconds per round; the only file that differs for equal keys
SUMMARY = "summary.json"  # the comparison at the end of `esper grow`
PICTURE = "growth.png"
PAGE = "report.html"
MODEL = "model.pt2"  # the grown network, as a torch.export program
EPISODES = "episodes.safetensors"  # recorded episodes
# Folders.
ARMS = "arms"  # run directories of the networks that the grown one is compared with
CHECKPOINTS = "checkpoints"
BEST_POLICY = "best"  # the policy with the best score on the validation hosts
GROWN = "grown"  # the grown network, as `esper.load` reads it
PROFILE = "profile"  # profiler traces of a round
TRACKED = "tracked"  # the files of experiment trackers, one folder per tracker
LOCK = ".lock"  # locked (not just present) while a process writes to the run
EVALUATION_LOCK = ".evaluation.lock"  # with LOCK, the folder of an evaluation would count as a run

# The files of a run; --overwrite removes them.
OWN = (
    *(CONFIG, EVENTS, METRICS, OUTCOMES, ACTIONS, TIMINGS, SUMMARY, PICTURE, PAGE, MODEL),
    *(EPISODES, ARMS, CHECKPOINTS, BEST_POLICY, GROWN, PROFILE, TRACKED),
)
FOLDERS = (ARMS, CHECKPOINTS, BEST_POLICY, GROWN, PROFILE, TRACKED)
# Files that are cut back to the checkpoint when a run is resumed.
HISTORY = (EVENTS, METRICS, OUTCOMES)

SCRIPT_HEADING = "# step  op  module  blueprint  blend"


class RunDirectory:
    """A `RoundRecorder` that writes to a folder, one line at a time; a context manager.

    The folder is locked until `close`, or the end of the process. Opening it changes nothing:
    `begin` or `resume` must follow; `create` opens and begins. With `script`, the actions of
    environment 0 are also written to actions.txt. Raises ConfigError if the folder is locked, and
    if a line cannot be written.
    """

    def __init__(self, path: Path, *, script: bool = False) -> None:
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
        """Open a folder and begin a run in it.

        `overwrite` replaces an existing run, but no other files, and no run that has begun after
        `since` (seconds of `time.time`). Raises ConfigError if there is such a run or file, or the
        folder cannot be written.
        """
        check_free(path, overwrite=overwrite)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
        record = RunDirectory(path, script=script)
        try:
            old = path / CONFIG
            if since is not None and old.is_file() and old.stat().st_mtime > since:
                raise ConfigError(f"another run has started in {path}; choose another folder")
            record.begin(config)
        except ConfigError:
            record.close()
            raise
        return record

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether a run has begun in this folder."""
        return (path / LOCK).exists() and (path / CONFIG).is_file()

    def begin(self, config: Mapping[str, Any]) -> None:
        """Begin an empty run in place of an existing one."""
        try:
            for name in OWN:
                _remove(self.path / name)
            _replace_text(self.path / CONFIG, to_toml(config))
            self._open_history()
            if self.script:
                self._append(ACTIONS, SCRIPT_HEADING)
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror}") from error

    def resume(self, config: Mapping[str, Any], sizes: Mapping[str, int], next_round: int) -> None:
        """Remove all rows that were written after the checkpoint with these file sizes."""
        path = self.path
        for name in HISTORY:
            length = (path / name).stat().st_size if (path / name).is_file() else 0
            if name not in sizes or length < sizes[name]:
                raise ConfigError(
                    f"{path / name} is shorter than at the checkpoint, so the run cannot be "
                    "resumed; start a new one"
                )
            os.truncate(path / name, sizes[name])
        if (path / TIMINGS).is_file():
            _replace_text(path / TIMINGS, _timings_before(path / TIMINGS, next_round))
        if self.script:
            _replace_text(path / ACTIONS, _script(read_rows(path / METRICS), 0))
        _replace_text(path / CONFIG, to_toml(config))
        self._open_history()

    def begin_round(self, number: int) -> None:
        self._round = {"round": number}

    def event(self, event: Event) -> None:
        self._write(EVENTS, event.row())

    def metrics(self, row: Mapping[str, Any]) -> None:
        self._write(METRICS, row)
        if self.script and row.get("env") == 0 and is_action(row):
            self._append(ACTIONS, script_line(row))

    def outcome(self, outcome: EpisodeOutcome) -> None:
        self._write(OUTCOMES, asdict(outcome))

    def timing(self, row: Mapping[str, Any]) -> None:
        self._write(TIMINGS, row)

    def sync(self) -> dict[str, int]:
        """Flush the history files to disk, and return their lengths in bytes. Raises ConfigError if
        the folder was deleted or replaced, because a deleted file can still be written."""
        for file in (self._lock, *self._files.values()):
            try:
                same = os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
            except OSError:
                same = False
            if not same:
                raise ConfigError(
                    f"{self.path} was deleted or replaced while the run wrote to it; start it again"
                )
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
        # Unbuffered: a row is written, or has failed, before the run continues.
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
    try:
        path.exists()
        str(path).encode()
    except OSError as error:
        raise ConfigError(f"{shortened(str(path))}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} cannot be the name of a folder: {error}") from error
    refuse_mixture(path, LOCK)
    taken = [name for name in OWN if (path / name).exists()]
    if taken and not (path / LOCK).exists():
        raise ConfigError(f"{path} holds a {taken[0]} but no run; choose another folder")
    if taken and not overwrite:
        resume = f", or continue it (--resume {path})" if CHECKPOINTS in taken else ""
        raise ConfigError(
            f"{path} already holds a run; choose another folder, or overwrite it "
            f"(--overwrite){resume}"
        )


def lock_folder(path: Path, name: str = LOCK) -> IO[bytes]:
    """Lock the folder until the file is closed; the kernel closes it when the process ends.

    The file is never removed, because another process might hold the lock on it.
    """
    try:
        file = (path / name).open("ab")
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
    # A view that checks whether a run is running holds the lock for an instant, hence the retries.
    for _ in range(20):
        try:
            if try_lock(file):
                refuse_mixture(path, name)
                return file
            time.sleep(0.005)
        except ConfigError:
            file.close()
            raise
        except OSError as error:
            file.close()
            raise ConfigError(f"cannot lock {path / name}: {error.strerror}") from error
    file.close()
    raise ConfigError(f"{path} is in use by another run; wait until it ends, or stop it")


def refuse_mixture(path: Path, lock: str) -> None:
    """Raises ConfigError for a run in the folder of an evaluation, and for the reverse."""
    other, what = (EVALUATION_LOCK, "an evaluation") if lock == LOCK else (LOCK, "a run")
    if (path / other).exists():
        raise ConfigError(f"{path} holds {what}; choose another folder")


def _timings_before(path: Path, round_: int) -> str:
    try:
        rows = list(read_rows(path, "round"))
        kept = [row for row in rows if int(row["round"]) < round_]
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        damaged = error if isinstance(error, ConfigError) else f"{path} is damaged: {error}"
        raise ConfigError(f"{damaged}; no result needs this file: delete it, then resume") from None
    return "".join(json.dumps(row) + "\n" for row in kept)


def _remove(path: Path) -> None:
    if path.name in FOLDERS and path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replace_text(path: Path, text: str) -> None:
    """Replace a file at once, so that it is never incomplete."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _unwritten(run: Path, name: str, error: OSError) -> ConfigError:
    cure = (
        f"free some space and continue with --resume {run}"
        if (run / CHECKPOINTS).is_dir()
        else "free some space and start again with --overwrite"
    )
    return ConfigError(f"{run / name} could not be written: {error.strerror}; {cure}")


def write_summary(run: Path, rows: list[dict[str, Any]]) -> None:
    try:
        _replace_text(run / SUMMARY, json.dumps(rows, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise _unwritten(run, SUMMARY, error) from error


def read_rows(path: Path, *needed: str) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl file, without a last line that is not yet complete. Raises ConfigError
    for a line that is no row, or a row without one of the columns `needed`."""
    with path.open("rb") as file:
        for i in count(1):
            line = file.readline(MAX_LINE + 1)
            if not line.endswith(b"\n") and len(line) <= MAX_LINE:
                return
            try:
                if len(line) > MAX_LINE:
                    raise ValueError(f"it is longer than {MAX_LINE:,} bytes")
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError("it is not a row")
                if missing := [name for name in needed if name not in row]:
                    raise ValueError(f"it has no {missing[0]}")
            except ValueError as error:
                raise ConfigError(f"{path} is damaged in line {i}: {error}") from error
            yield row


def is_action(row: Mapping[str, Any]) -> bool:
    """Whether a metrics row is of a step with an action other than WAIT."""
    return row["kind"] == "step" and row["op"] != "WAIT"


def script_line(row: Mapping[str, Any]) -> str:
    """The action of a step as a line of a script for the controller `scripted:FILE`."""
    words = [row["step"], row["op"], row["slot"], row["blueprint"], row["blend"]]
    return "  ".join(str(word) for word in words if word is not None)


def episode_script(run: Path, round_: int, env: int) -> str:
    """The actions of one episode of a run of many rounds, as a script."""
    return _script((row for row in read_rows(run / METRICS) if row["round"] == round_), env)


def _script(rows: Iterable[Mapping[str, Any]], env: int) -> str:
    lines = [script_line(row) for row in rows if row.get("env") == env and is_action(row)]
    return "\n".join([SCRIPT_HEADING, *lines]) + "\n"


def to_toml(config: Mapping[str, Any]) -> str:
    """A flat mapping as TOML; None values become comments."""
    lines = []
    for key, value in config.items():
        if value is None:
            lines.append(f"# {key} is not set")
        else:
            # JSON of these types is TOML too; everything else is written as text.
            finite = isinstance(value, float) and math.isfinite(value)
            same = finite or value == {} or isinstance(value, int | tuple | list)
            lines.append(f"{key} = {json.dumps(value if same else str(value))}")
    return "\n".join(lines) + "\n"
