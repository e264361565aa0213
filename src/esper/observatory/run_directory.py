"""The run directory: what training writes and every view reads, live or afterwards.

config.toml      the settings of the run
events.jsonl     what happened, one typed event per line
metrics.jsonl    one flat row per environment step
outcomes.jsonl   one row per episode
actions.txt      the actions of environment 0, as a script that repeats the run
summary.json     the comparison that a finished run ends with
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from esper.leyline import ConfigError, EpisodeOutcome
from esper.leyline.events import Event

EVENTS, METRICS, OUTCOMES = "events.jsonl", "metrics.jsonl", "outcomes.jsonl"
ACTIONS, CONFIG, SUMMARY, PICTURE = "actions.txt", "config.toml", "summary.json", "growth.png"
_OWN = (EVENTS, METRICS, OUTCOMES, ACTIONS, CONFIG, SUMMARY, PICTURE)


class RunDirectory:
    """A recorder that writes to a folder, one flushed line at a time.

    Raises ConfigError if the folder already holds a run and `overwrite` is False, or cannot be
    written. Use it as a context manager, or call `close`.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path = path
        if not overwrite and any((path / name).exists() for name in _OWN):
            raise ConfigError(
                f"{path} already holds a run; choose another folder or overwrite it (--overwrite)"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name in _OWN:
                (path / name).unlink(missing_ok=True)
            (path / CONFIG).write_text(to_toml(config), encoding="utf-8")
            self._files = {
                name: (path / name).open("w", encoding="utf-8")
                for name in (EVENTS, METRICS, OUTCOMES, ACTIONS)
            }
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}") from error

    def event(self, event: Event) -> None:
        self._write(EVENTS, {"event": type(event).__name__, **asdict(event)})

    def metrics(self, row: Mapping[str, Any]) -> None:
        self._write(METRICS, row)
        if row.get("env") == 0 and row.get("op", "WAIT") != "WAIT":
            words = [row["step"], row["op"], row["slot"], row["blueprint"], row["blend"]]
            self._line(ACTIONS, "  ".join(str(word) for word in words if word is not None))

    def outcome(self, outcome: EpisodeOutcome) -> None:
        self._write(OUTCOMES, asdict(outcome))

    def _write(self, name: str, row: Mapping[str, Any]) -> None:
        self._line(name, json.dumps(row, allow_nan=False))

    def _line(self, name: str, text: str) -> None:
        file: IO[str] = self._files[name]
        file.write(text + "\n")
        file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl file; a last line that is still being written is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def write_summary(folder: Path, rows: list[dict[str, Any]]) -> None:
    text = json.dumps(rows, indent=2, allow_nan=False)
    (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")


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
        else:
            # A JSON string without control characters is a TOML basic string.
            lines.append(f"{key} = {json.dumps(str(value))}")
    return "\n".join(lines) + "\n"
