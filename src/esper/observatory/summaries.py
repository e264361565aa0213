"""Runs on the terminal: a table of all, the summary of one, a comparison of several."""

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from esper.leyline import ConfigError
from esper.observatory.describe import MAX_ROWS, round_columns, score_curve, summary_as_dict
from esper.observatory.evaluation import evaluation_summary
from esper.observatory.formatting import (
    POLICY,
    format_columns,
    format_duration,
    format_number,
    mean_of,
    safe_text,
    sanitize,
)
from esper.observatory.reading import Row, UnreadableError, number, open_rows, read_json
from esper.observatory.run_directory import METRICS, OUTCOMES, SUMMARY, read_rows
from esper.observatory.runs import RunSummary, is_run, read_evaluation, read_run, summarize_run
from esper.observatory.terminal import growth_summary, plain_table, print_spaced, say

STATE_STYLES = {"running": "bold green", "finished": "none", "stopped": "yellow", "broken": "red"}


def runs_table(runs: Sequence[RunSummary]) -> Table:
    headings = ("run", "task", "controller", "val", "test", "params", "done", "state")
    table = plain_table(*headings, gap=1)
    for column in table.columns[1:3]:
        column.justify, column.no_wrap, column.overflow = "left", False, "fold"
    for run in runs:
        table.add_row(
            escape(safe_text(run.id)),
            escape(safe_text(run.task or "-", 24)),
            escape(safe_text(run.controller or "-", 40)),
            format_number(run.val_score, ".1f"),
            format_number(run.test_score, ".1f"),
            format_number(run.params, ",.0f"),
            _progress(run),
            f"[{STATE_STYLES[run.state]}]{run.state}[/]",
        )
    return table


def _progress(run: RunSummary) -> str:
    if run.done is None:
        return "-"
    return str(run.done) if run.total is None else f"{run.done}/{run.total}"


def show_run(console: Console, folder: Path) -> None:
    """Print the summary of a run or evaluation. Raises ConfigError if it is neither."""
    if not is_run(folder):
        raise ConfigError(f"{folder} is neither a run nor an evaluation")
    run = summarize_run(folder)
    about = f": {safe_text(run.why, 400)}" if run.why else ""
    say(console, f"{safe_text(run.id)}: {run.kind}, {run.state}{about}", whole=True)
    if run.started and run.updated:
        left = "" if run.left is None else f", about {format_duration(run.left)} left"
        took = format_duration(max(0.0, run.updated - run.started))
        last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.updated))
        say(console, f"{_progress(run)} {run.unit} in {took}{left}; last row {last}")
    try:
        summary = {"evaluation": _evaluation, "training": _training}.get(run.kind, _growth)(folder)
    except (LookupError, TypeError, ValueError, OSError, AttributeError) as error:
        raise ConfigError(f"the summary of {folder} cannot be read: {error}") from error
    print_spaced(console, summary)


def run_as_json(folder: Path) -> dict[str, Any]:
    """The summary of a run or evaluation as data."""
    summary = summarize_run(folder)
    data = summary_as_dict(summary)
    if summary.kind == "evaluation":
        return {**data, "report": read_evaluation(folder)}
    run = read_run(folder)
    if summary.kind == "training":
        return {**data, "round": run.round}
    return {**data, "arms": run.summary, "outcome": run.outcome}


def _evaluation(folder: Path) -> list[Table | Text]:
    return evaluation_summary(sanitize(read_evaluation(folder)))


def _growth(folder: Path) -> list[Table | Text]:
    run = read_run(folder)
    summary, outcome, seeds = map(sanitize, (run.summary, run.outcome, run.seeds))
    return growth_summary(summary, outcome, seeds, "score")


def _training(folder: Path) -> list[Table | Text]:
    row = read_run(folder).round
    table = plain_table("the latest round", "", "")
    table.columns[2].justify, table.columns[2].no_wrap = "left", False
    for name, quantity in POLICY.items():
        value = format_number(number(row, name), ",.4g")
        table.add_row(quantity.label, value, f"[dim]{quantity.meaning}[/]")
    anomalies = row.get("anomalies")
    return [table, *([Text(f"anomalies: {safe_text(anomalies)}")] if anomalies else [])]


AVERAGED = (
    "val_score", "params", "macs", "train_macs", "germinated", "fossilized", "culled", "rollbacks",
)  # fmt: skip
LATE = 0.1  # share of the episodes, at the end, that shows what a learning run has reached


def compare_runs(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Means over the episodes of every run; `late_val_score` is the mean of the last tenth.

    `test_score` is that of the grown network, if the run tested it. Raises ConfigError for a folder
    without outcomes, and for damaged files.
    """
    return [_averages(run) for run in runs]


def _averages(run: Path) -> dict[str, Any]:
    if not (run / OUTCOMES).is_file():
        raise ConfigError(f"{run} is not a run directory: it has no {OUTCOMES}")
    rows = list(read_rows(run / OUTCOMES))
    for i, row in enumerate(rows, start=1):
        _check_outcome(run / OUTCOMES, i, row)
    if not rows:
        raise ConfigError(f"{run} holds no outcome yet; none of its episodes has ended")
    late = rows[-max(1, round(LATE * len(rows))) :]
    return {
        "run": str(run),
        "task": _common_value(rows, "task"),
        "controller": _common_value(rows, "controller"),
        "episodes": len(rows),
        **{name: mean_of(rows, name) for name in AVERAGED},
        "late_val_score": mean_of(late, "val_score"),
        "total_reward": mean_of(rows, "total_reward"),
        "test_score": _test_score(run / SUMMARY),
    }


def _check_outcome(path: Path, i: int, row: Row) -> None:
    """Raises ConfigError for a row that cannot be averaged."""
    for name in (*AVERAGED, "total_reward"):
        if row.get(name) is not None and number(row, name) is None:
            raise ConfigError(f"{path} is damaged: {name} of row {i} is not a number")


def _common_value(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    values = {str(row.get(name)) for row in rows}
    return values.pop() if len(values) == 1 else "several"


def _test_score(path: Path) -> float | None:
    try:
        arms = read_json(path)
        score = next((row.get("test_score") for row in arms if row.get("arm") == "grown"), None)
        return None if score is None else score + 0.0
    except FileNotFoundError:
        return None
    except (UnreadableError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = plain_table(
        *("\nrun", "epi-\nsodes", "vali-\ndation", "last\ntenth", "\ntest", "\nreturn"),
        *("\nparams", "train\n10^6", "seeds/kept\n/removed", "roll\nback"),
        gap=1,
    )
    scores = dict.fromkeys(("val_score", "late_val_score", "test_score"), ".1f")
    forms = {"episodes": "d", **scores, "total_reward": "+.3f", "params": ",.0f"}
    counts = dict.fromkeys(("germinated", "fossilized", "culled"), ".1f")
    for row in rows:
        macs = row["train_macs"]
        table.add_row(
            escape(row["run"]),
            *format_columns(row, forms),
            format_number(None if macs is None else macs / 1e6, ",.0f"),
            "/".join(format_columns(row, counts)),
            format_number(row["rollbacks"], ".1f"),
        )
    return table


def compare_curves(folders: Sequence[Path], names: Sequence[str]) -> dict[str, Any]:
    """Score curves of several runs, and paired differences on the keys that two of them share."""
    pairs = []
    scores = [_scores_by_key(folder) for folder in folders]
    for (a, first), (b, second) in combinations(zip(names, scores, strict=True), 2):
        differences = [first[key] - second[key] for key in first.keys() & second.keys()]
        n = len(differences)
        if n:
            error = (variance(differences) / n) ** 0.5 if n > 1 else None
            pairs.append({"a": a, "b": b, "n": n, "mean": fmean(differences), "error": error})
    curves = [{"name": name, **_curve(run)} for run, name in zip(folders, names, strict=True)]
    return sanitize({"curves": curves, "pairs": pairs})


def _curve(folder: Path) -> dict[str, Any]:
    if read_run(folder).kind != "training":
        return {"over": "epoch", **score_curve(folder)}
    with open_rows(folder / METRICS) as lines:
        rounds = round_columns(lines)
    return {"over": "round", "x": rounds["round"], "y": rounds["val_score"]}


def _scores_by_key(folder: Path) -> dict[tuple[str, Any], float]:
    """Validation score by (task, key); the latest, if a key was played twice."""
    with open_rows(folder / OUTCOMES) as lines:
        return {
            (str(row.get("task")), row["key"]): score
            for row in lines.sample(MAX_ROWS)
            if (score := number(row, "val_score")) is not None and isinstance(row.get("key"), int)
        }
