"""The runs of a folder: a summary of each, with its state.

running   a process holds the run's lock
finished  the run has reached its end
stopped   it has not, and no process continues it
broken    some of its files cannot be read
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper.observatory.evaluation import REPORT
from esper.observatory.reading import (
    ROUND_ROW,
    JsonLines,
    Row,
    UnreadableError,
    integer,
    is_locked,
    number,
    open_rows,
    read_json,
    read_toml,
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

MAX_DEPTH, MAX_FOLDERS = 4, 20_000
WATCHED = (CONFIG, EVENTS, METRICS, OUTCOMES, TIMINGS, SUMMARY, REPORT)


@dataclass(frozen=True)
class RunSummary:
    """One run or evaluation in a list of runs; None is unknown.

    `id` is the path relative to the folder that was searched. `kind` is growth, training (PPO),
    offline (recording episodes, or learning from them) or evaluation. `done` and `total` count
    `unit`. Times are seconds since 1970; `left` is an estimate in seconds.
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
class RunContents:
    """The small contents of a run: settings, last rows, summary, and what is wrong with them."""

    config: dict[str, Any] = field(default_factory=dict)
    metrics: Row = field(default_factory=dict)
    round: Row = field(default_factory=dict)
    outcome: Row = field(default_factory=dict)
    summary: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        if "command" in self.config:
            return "offline"
        return "training" if "rounds" in self.config else "growth"

    @property
    def grown(self) -> Row:
        """The row of the run's own network in its summary."""
        return next((row for row in self.summary if row.get("arm") == "grown"), {})

    @property
    def seeds(self) -> list[Row]:
        """The seeds that were kept."""
        seeds = self.grown.get("seeds") or self.outcome.get("seeds")
        return [seed for seed in seeds if isinstance(seed, dict)] if isinstance(seeds, list) else []


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run or an evaluation."""
    has = {name for name in (CONFIG, LOCK, METRICS, REPORT) if (folder / name).is_file()}
    return bool(has & {METRICS, REPORT}) or has >= {CONFIG, LOCK}


def find_runs(root: Path) -> list[RunSummary]:
    """Every run and evaluation below `root`: running ones first, then the most recent.

    Links are not followed. The arms inside a run are not listed.
    """
    found, seen = [], 0
    queue = [(root, 0)]
    while queue and seen < MAX_FOLDERS:
        folder, depth = queue.pop()
        seen += 1
        try:
            if is_run(folder):
                found.append(summarize_run(folder, root))
                continue
        except PermissionError:
            continue
        if depth < MAX_DEPTH:
            queue += [(inner, depth + 1) for inner in _folders(folder)]
    return sorted(found, key=lambda run: (run.state != "running", -(run.updated or 0), run.id))


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def read_run(folder: Path) -> RunContents:
    run = RunContents()
    try:
        run.config = read_toml(folder / CONFIG)
    except FileNotFoundError:
        run.faults.append(f"{CONFIG} is missing")
    except UnreadableError as error:
        run.faults.append(str(error))
    run.metrics = _last_row(folder / METRICS, run)
    run.outcome = _last_row(folder / OUTCOMES, run)
    if run.kind == "training":
        with open_rows(folder / METRICS) as lines:
            run.round = lines.last_with(ROUND_ROW, 0, lines.end) or {}
    try:
        rows = read_json(folder / SUMMARY)
        run.summary = [row for row in rows if isinstance(row, dict)]
    except FileNotFoundError:
        pass  # not every run ends with a comparison
    except (UnreadableError, TypeError):
        run.faults.append(f"{SUMMARY} is damaged")
    return run


def _last_row(path: Path, run: RunContents) -> Row:
    try:
        with JsonLines(path) as lines:
            row = lines.last() or {}
            if lines.damaged:
                run.faults.append(f"{path.name} has damaged lines at its end")
            return row
    except FileNotFoundError:
        run.faults.append(f"{path.name} is missing")
    except UnreadableError as error:
        run.faults.append(str(error))
    return {}


def summarize_run(folder: Path, root: Path | None = None) -> RunSummary:
    """The summary of one run or evaluation at this moment."""
    name = str(folder.relative_to(root)) if root is not None else str(folder)
    evaluation = (folder / REPORT).is_file()
    try:
        return _summarize_evaluation(name, folder) if evaluation else _summarize(name, folder)
    except Exception as error:  # noqa: BLE001  # whatever a damaged folder holds, list the others
        why = f"its files are damaged: {error}"
        return RunSummary(name, folder, "evaluation" if evaluation else "growth", "broken", why)


def _summarize(name: str, folder: Path) -> RunSummary:
    run = read_run(folder)
    started, updated = _modified(folder / CONFIG), _last_modified(folder)
    training = run.kind == "training"
    done, total = integer(run.metrics, "step"), integer(run.config, "steps")
    if training:
        ended = integer(run.round, "round")
        done, total = 0 if ended is None else ended + 1, integer(run.config, "rounds")
    state, why = _state(folder, run, done, total)
    left = None
    if state == "running" and done and total and done <= total:
        pace = _seconds_per_round(folder) if training else None
        if not training and started and updated:
            pace = (updated - started) / done
        left = None if pace is None else (total - done) * pace
    # Scores of the network that was kept, of the latest round, or of the epoch under way.
    scored = {"growth": run.outcome or run.metrics, "training": run.round}
    latest = scored.get(run.kind, run.metrics)
    task = run.config.get("task")
    controller = "ppo" if training else run.config.get("controller", run.config.get("command"))
    return RunSummary(
        id=name,
        folder=folder,
        kind=run.kind,
        state=state,
        why=why,
        task=None if task is None else str(task),
        controller=None if controller is None else str(controller),
        key=integer(run.config, "key"),
        val_score=number(latest, "val_score"),
        test_score=number(run.grown, "test_score"),
        params=number(latest, "params"),
        unit="rounds" if training else "epochs",
        done=done,
        total=total,
        started=started,
        updated=updated,
        left=left,
    )


def _seconds_per_round(folder: Path) -> float | None:
    """From the timings: a training run may have been resumed, so its start time says nothing."""
    with open_rows(folder / TIMINGS) as lines:
        return number(lines.last() or {}, "seconds")


def _state(folder: Path, run: RunContents, done: int | None, total: int | None) -> tuple[str, str]:
    """(state, reason for it)."""
    faults = "; ".join(run.faults)
    if is_locked(folder / LOCK):
        return "running", faults
    if faults:
        return "broken", faults
    if _has_ended(folder, run, done, total):
        return "finished", ""
    if run.outcome.get("ended") == "interrupted":
        return "stopped", "the run was interrupted"
    why = "its process ended before the run did"
    if run.kind == "training" and (folder / CHECKPOINTS).is_dir():
        why += f"; continue it with esper train ppo --resume {folder}"
    return "stopped", why


def _has_ended(folder: Path, run: RunContents, done: int | None, total: int | None) -> bool:
    if run.kind == "training":
        return total is not None and done is not None and done >= total
    if run.kind == "offline":
        record = run.config.get("command") == "record"
        return (folder / (EPISODES if record else CHECKPOINTS)).exists()
    compared = bool(run.summary) or run.config.get("compare") is not True
    return run.outcome.get("ended") not in (None, "interrupted") and compared


def _summarize_evaluation(name: str, folder: Path) -> RunSummary:
    report = read_evaluation(folder)
    keys, wanted = len(report["keys"]), integer(report, "keys_wanted")
    complete = wanted is None or keys >= wanted
    reference = report.get("reference")
    # With several extra budgets the arm with the largest, which is the last, represents it.
    own = [arm for arm in report["arms"] if reference in (arm["arm"], arm.get("name"))]
    arm: Row = own[-1] if own else {}
    return RunSummary(
        id=name,
        folder=folder,
        kind="evaluation",
        state="finished" if complete else "stopped",
        why="" if complete else "the evaluation was interrupted",
        task=str(report.get("task")),
        controller=", ".join(controllers(report)),
        val_score=number(arm, "val_score"),
        test_score=number(arm, "test_score"),
        params=number(arm, "params"),
        unit="keys",
        done=keys,
        total=wanted,
        updated=_modified(folder / REPORT),
    )


# What the tables and plots of an evaluation need.
ARM_NUMBERS = (
    "test_score", "params", "macs", "train_macs", "cpu_seconds", "germinated", "fossilized",
    "culled", "rollbacks", "learning_rate",
)  # fmt: skip


def controllers(report: Mapping[str, Any]) -> list[str]:
    """The arms of an evaluation that were asked for, without the controls."""
    own = [str(arm["arm"]) for arm in report["arms"] if not arm["control_of"]]
    return report.get("arms_wanted") or own


def read_evaluation(folder: Path) -> dict[str, Any]:
    """The report of an evaluation. Raises FileNotFoundError, or UnreadableError if it is not
    complete."""
    report = read_json(folder / REPORT)
    try:
        complete = _is_complete(report)
    except (TypeError, KeyError, AttributeError):
        complete = False
    if not complete:
        raise UnreadableError(f"{REPORT} is not the report of an evaluation")
    return dict(report)


def _is_complete(report: Any) -> bool:
    """Whether tables and plots can be made of it. May raise if it is something else."""
    return (
        all(isinstance(report[name], str) for name in ("task", "score"))
        and isinstance(report["keys"], list)
        and report["learning_rates"]
        and all(_are_numbers(report.get(name, [])) for name in ("learning_rates", "extra"))
        and all(isinstance(name, str) for name in report.get("arms_wanted") or [])
        and all(isinstance(row["arm"], str) for row in report["arms"] + report["trials"])
        and all("control_of" in arm for arm in report["arms"])
        and all(number(arm, name) is not None for arm in report["arms"] for name in ARM_NUMBERS)
        and all(number(trial, "test_score") is not None for trial in report["trials"])
        and all(
            isinstance(row["arm"], str)
            and isinstance(row["versus"], str)
            and number(row, "mean") is not None
            and "p_holm" in row
            and (number(row, "low") is None) == (number(row, "high") is None)
            for row in report["comparisons"]
        )
    )


def _are_numbers(values: Any) -> bool:
    return all(number({"": value}, "") is not None for value in [*values])


def fingerprint(folder: Path) -> str:
    """A text that changes whenever something in the run does that a view shows."""
    marks: list[str] = [str(is_locked(folder / LOCK))]
    for name in WATCHED:
        try:
            found = os.stat(folder / name, follow_symlinks=False)
        except OSError:
            marks.append("-")
        else:
            marks.append(f"{found.st_ino}.{found.st_size}.{found.st_mtime_ns}")
    return " ".join(marks)


def _modified(path: Path) -> float | None:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return None


def _last_modified(folder: Path) -> float | None:
    times = [time for name in (METRICS, OUTCOMES, SUMMARY) if (time := _modified(folder / name))]
    return max(times, default=_modified(folder / CONFIG))
