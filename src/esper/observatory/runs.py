"""What there is in a folder of runs: a line for each, with the state it is in.

running   a process holds the run's lock
finished  it has come to its end
stopped   it has not, and nobody goes on with it
broken    what it has left cannot be read, wholly or in part
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper.observatory.evaluation import REPORT
from esper.observatory.reading import (
    ROUND_ROW,
    Lines,
    Row,
    UnreadableError,
    is_locked,
    number,
    read_json,
    read_text,
    whole,
)
from esper.observatory.run_directory import (
    CHECKPOINTS,
    CONFIG,
    EPISODES,
    EVENTS,
    LOCK,
    METRICS,
    OUTCOMES,
    SUMMARY,
    TIMINGS,
)

DEEPEST, MOST_FOLDERS = 4, 20_000
WATCHED = (CONFIG, EVENTS, METRICS, OUTCOMES, TIMINGS, SUMMARY, REPORT)


@dataclass(frozen=True)
class RunLine:
    """One run or evaluation at a glance; None is not known.

    `id` is the folder as seen from the one that was searched. `done` and `total` count `unit`.
    Times are seconds since 1970; `left` is a guess from the speed so far.
    """

    id: str
    folder: Path
    kind: str
    state: str
    why: str = ""
    task: str | None = None
    controller: str | None = None
    key: int | None = None
    val_score: float | None = None
    test_score: float | None = None
    params: float | None = None
    unit: str = "epochs"
    done: int | None = None
    total: int | None = None
    started: float | None = None
    updated: float | None = None
    left: float | None = None


@dataclass
class Glance:
    """The small parts of a run: settings, last rows, summary; and what was wrong with them."""

    config: dict[str, Any] = field(default_factory=dict)
    metrics: Row = field(default_factory=dict)
    round: Row = field(default_factory=dict)
    outcome: Row = field(default_factory=dict)
    summary: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def grown(self) -> Row:
        """The run's own network in the comparison that it ended with."""
        return next((row for row in self.summary if row.get("arm") == "grown"), {})


def kept_seeds(seen: Glance) -> list[Row]:
    seeds = seen.grown.get("seeds") or seen.outcome.get("seeds")
    return [seed for seed in seeds if isinstance(seed, dict)] if isinstance(seeds, list) else []


def is_run(folder: Path) -> bool:
    has = {name for name in (CONFIG, LOCK, METRICS, REPORT) if (folder / name).is_file()}
    return bool(has & {METRICS, REPORT}) or has >= {CONFIG, LOCK}


def find_runs(root: Path) -> list[RunLine]:
    """Every run and evaluation below `root`, those that run first, then the latest.

    Links are not followed. What compares itself inside a run is no run of the list.
    """
    found, seen = [], 0
    waiting = [(root, 0)]
    while waiting and seen < MOST_FOLDERS:
        folder, depth = waiting.pop()
        seen += 1
        if is_run(folder):
            found.append(look_at(folder, root))
        elif depth < DEEPEST:
            waiting += [(inner, depth + 1) for inner in _folders(folder)]
    return sorted(found, key=lambda line: (line.state != "running", -(line.updated or 0), line.id))


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []  # it has gone, or is not ours to read: there is no run in it to show


def look_at(folder: Path, root: Path | None = None) -> RunLine:
    """The line of one run or evaluation, as it is at this moment. Raises nothing."""
    name = str(folder.relative_to(root)) if root is not None else str(folder)
    if (folder / REPORT).is_file():
        return _evaluation_line(name, folder)
    return _run_line(name, folder, glance(folder))


def glance(folder: Path) -> Glance:
    seen = Glance()
    try:
        seen.config = tomllib.loads(read_text(folder / CONFIG))
    except FileNotFoundError:
        seen.faults.append(f"{CONFIG} is missing")
    except UnreadableError as error:
        seen.faults.append(str(error))
    except tomllib.TOMLDecodeError:
        seen.faults.append(f"{CONFIG} is damaged")
    _read_last(folder, seen)
    try:
        rows = read_json(folder / SUMMARY)
        seen.summary = [row for row in rows if isinstance(row, dict)]
    except FileNotFoundError:
        pass  # not every run ends with a comparison
    except (UnreadableError, TypeError):
        seen.faults.append(f"{SUMMARY} is damaged")
    return seen


def _read_last(folder: Path, seen: Glance) -> None:
    """The last rows, and the row of the last round that has ended."""
    for name in (METRICS, OUTCOMES):
        try:
            with Lines(folder / name) as lines:
                row = lines.last() or {}
                if lines.damaged:
                    seen.faults.append(f"{name} has damaged lines at its end")
                if name == OUTCOMES:
                    seen.outcome = row
                    continue
                seen.metrics = row
                if kind_of(seen.config) == "training":
                    seen.round = lines.last_with(ROUND_ROW, 0, lines.end) or {}
        except FileNotFoundError:
            seen.faults.append(f"{name} is missing")
        except UnreadableError as error:
            seen.faults.append(str(error))


def _run_line(name: str, folder: Path, seen: Glance) -> RunLine:
    config, last = seen.config, seen.metrics
    kind = kind_of(config)
    started, updated = _changed(folder / CONFIG), _latest(folder)
    unit, done, total = _progress(kind, seen)
    state, why = _state(folder, kind, seen, done, total)
    left = None
    if state == "running" and done and total and done <= total:
        pace = _pace(folder, kind, started, updated, done)
        left = None if pace is None else (total - done) * pace
    task, controller = config.get("task"), _controller(config)
    # Of the network that was kept, of the mean of a round, or of what is being trained.
    shown = {"growth": seen.outcome or last, "training": seen.round}.get(kind, last)
    return RunLine(
        id=name,
        folder=folder,
        kind=kind,
        state=state,
        why=why,
        task=None if task is None else str(task),
        controller=controller,
        key=whole(config, "key"),
        val_score=number(shown, "val_score"),
        test_score=number(seen.grown, "test_score"),
        params=number(shown, "params"),
        unit=unit,
        done=done,
        total=total,
        started=started,
        updated=updated,
        left=left,
    )


def kind_of(config: Mapping[str, Any]) -> str:
    if "command" in config:
        return "lessons"
    return "training" if "rounds" in config else "growth"


def _controller(config: Mapping[str, Any]) -> str | None:
    if "rounds" in config:
        return "ppo"
    named = config.get("controller", config.get("command"))
    return None if named is None else str(named)


def _progress(kind: str, seen: Glance) -> tuple[str, int | None, int | None]:
    """(what is counted, how many are done, of how many)."""
    if kind == "training":
        ended = whole(seen.round, "round")
        return "rounds", 0 if ended is None else ended + 1, whole(seen.config, "rounds")
    return "epochs", whole(seen.metrics, "step"), whole(seen.config, "steps")


def _pace(
    folder: Path, kind: str, started: float | None, updated: float | None, done: int
) -> float | None:
    """Seconds for one more. A training run, which may have been resumed, keeps its own times."""
    if kind != "training":
        return (updated - started) / done if started and updated else None
    try:
        with Lines(folder / TIMINGS) as lines:
            return number(lines.last() or {}, "seconds")
    except (FileNotFoundError, UnreadableError):
        return None


def _state(
    folder: Path, kind: str, seen: Glance, done: int | None, total: int | None
) -> tuple[str, str]:
    running = is_locked(folder / LOCK)
    if running:
        return "running", "; ".join(seen.faults)
    if seen.faults:
        return "broken", "; ".join(seen.faults)
    if _has_ended(folder, kind, seen, done, total):
        return "finished", ""
    if seen.outcome.get("ended") == "interrupted":
        return "stopped", "it was interrupted"
    if kind == "training" and (folder / CHECKPOINTS).is_dir():
        return "stopped", f"its process has ended; esper train ppo --resume {folder} goes on"
    return "stopped", "its process has ended before the run did"


def _has_ended(folder: Path, kind: str, seen: Glance, done: int | None, total: int | None) -> bool:
    if kind == "training":
        return total is not None and done is not None and done >= total
    if kind == "lessons":
        record = seen.config.get("command") == "record"
        return (folder / (EPISODES if record else CHECKPOINTS)).exists()
    compared = bool(seen.summary) or seen.config.get("compare") is not True
    return seen.outcome.get("ended") not in (None, "interrupted") and compared


def _evaluation_line(name: str, folder: Path) -> RunLine:
    updated = _changed(folder / REPORT)
    try:
        report = read_evaluation(folder)
    except (FileNotFoundError, UnreadableError) as error:
        why = str(error) if isinstance(error, UnreadableError) else f"{REPORT} is missing"
        return RunLine(name, folder, "evaluation", "broken", why, updated=updated)
    keys, wanted = len(report["keys"]), whole(report, "keys_wanted")
    complete = wanted is None or keys >= wanted
    reference = report.get("reference")
    # With several extra budgets the largest, which stands last, speaks for the arm.
    own = [arm for arm in report["arms"] if reference in (arm["arm"], arm.get("name"))]
    arm: Row = own[-1] if own else {}
    return RunLine(
        id=name,
        folder=folder,
        kind="evaluation",
        state="finished" if complete else "stopped",
        why="" if complete else "it was interrupted",
        task=str(report.get("task")),
        controller=", ".join(
            report.get("arms_wanted")
            or [str(arm["arm"]) for arm in report["arms"] if not arm["control_of"]]
        ),
        val_score=number(arm, "val_score"),
        test_score=number(arm, "test_score"),
        params=number(arm, "params"),
        unit="keys",
        done=keys,
        total=wanted,
        updated=updated,
    )


# What the tables and plots of an evaluation are made of.
ARM_NUMBERS = (
    "test_score", "params", "macs", "train_macs", "cpu_seconds", "germinated", "fossilized",
    "culled", "rollbacks", "learning_rate",
)  # fmt: skip


def read_evaluation(folder: Path) -> dict[str, Any]:
    """The report of an evaluation. Raises FileNotFoundError, or UnreadableError if parts lack."""
    report = read_json(folder / REPORT)
    try:
        complete = _is_report(report)
    except (TypeError, KeyError, AttributeError):
        complete = False
    if not complete:
        raise UnreadableError(f"{REPORT} is not the report of an evaluation")
    return dict(report)


def _is_report(report: Any) -> bool:
    """Has it all that tables and plots are made of? May raise if it is something else."""
    arms = all(
        isinstance(arm["arm"], str)
        and "control_of" in arm
        and all(number(arm, name) is not None for name in ARM_NUMBERS)
        for arm in report["arms"]
    )
    comparisons = all(
        isinstance(row["arm"], str)
        and isinstance(row["versus"], str)
        and number(row, "mean") is not None
        and "p_holm" in row
        and (number(row, "low") is None) == (number(row, "high") is None)
        for row in report["comparisons"]
    )
    trials = all(
        isinstance(trial["arm"], str) and number(trial, "test_score") is not None
        for trial in report["trials"]
    )
    named = isinstance(report["task"], str) and isinstance(report["score"], str)
    return arms and comparisons and trials and named and isinstance(report["keys"], list)


def stamp(folder: Path) -> str:
    """A text that changes when anything in the run does that a view shows."""
    marks: list[str] = [str(is_locked(folder / LOCK))]
    for name in WATCHED:
        try:
            found = os.stat(folder / name, follow_symlinks=False)
        except OSError:
            marks.append("-")
        else:
            marks.append(f"{found.st_ino}.{found.st_size}.{found.st_mtime_ns}")
    return " ".join(marks)


def _changed(path: Path) -> float | None:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return None


def _latest(folder: Path) -> float | None:
    times = [time for name in (METRICS, OUTCOMES, SUMMARY) if (time := _changed(folder / name))]
    return max(times, default=_changed(folder / CONFIG))
