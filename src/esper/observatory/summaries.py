"""Runs on the terminal: a table of all, and the summary of one."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from esper.leyline import ConfigError
from esper.observatory.describe import summary_as_dict
from esper.observatory.evaluation import evaluation_summary
from esper.observatory.formatting import format_duration, format_number, safe_text, sanitize
from esper.observatory.quantities import POLICY
from esper.observatory.reading import number
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
