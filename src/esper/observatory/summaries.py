"""Runs on the terminal, after the fact: a table of all, and one of them summed up again."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.leyline import ConfigError
from esper.observatory.described import shown_line
from esper.observatory.evaluation import arms_table, comparisons_table, seeds_worth_table
from esper.observatory.looks import plain, presentable
from esper.observatory.quantities import POLICY
from esper.observatory.reading import UnreadableError, number
from esper.observatory.runs import RunLine, glance, is_run, kept_seeds, look_at, read_evaluation
from esper.observatory.terminal import (
    clock,
    growth_in_words,
    plain_table,
    say,
    seeds_table,
    shown,
    summary_table,
)

STATE_STYLES = {"running": "bold green", "finished": "", "stopped": "yellow", "broken": "red"}


def runs_as_json(lines: Sequence[RunLine]) -> list[dict[str, Any]]:
    return [shown_line(line) for line in lines]


def runs_table(lines: Sequence[RunLine]) -> Table:
    table = plain_table(
        "run", "task", "controller", "val", "test", "params", "done", "state", gap=1
    )
    for column in table.columns[1:3]:
        column.justify, column.no_wrap, column.overflow = "left", False, "fold"
    for line in lines:
        style = STATE_STYLES[line.state]
        state = f"[{style}]{line.state}[/]" if style else line.state
        table.add_row(
            escape(plain(line.id)),
            escape(plain(line.task or "-", 24)),
            escape(plain(line.controller or "-", 40)),
            shown(line.val_score, ".1f"),
            shown(line.test_score, ".1f"),
            shown(line.params, ",.0f"),
            done_of(line),
            state,
        )
    return table


def done_of(line: RunLine) -> str:
    if line.done is None:
        return "-"
    return str(line.done) if line.total is None else f"{line.done}/{line.total}"


def show_run(console: Console, folder: Path) -> None:
    """Print the summary of a run or evaluation. Raises ConfigError if it is neither."""
    if not is_run(folder):
        raise ConfigError(f"{folder} is neither a run nor an evaluation")
    line = look_at(folder)
    about = f": {plain(line.why, 400)}" if line.why else ""
    say(console, f"{plain(line.id)}: {line.kind}, {line.state}{about}", whole=True)
    if line.started and line.updated:
        left = "" if line.left is None else f", about {clock(line.left)} left"
        took = clock(max(0.0, line.updated - line.started))
        last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.updated))
        say(console, f"{done_of(line)} {line.unit} in {took}{left}; last row {last}")
    console.print()
    if line.kind == "evaluation":
        _show_evaluation(console, folder)
    elif line.kind == "training":
        _show_training(console, folder)
    else:
        _show_growth(console, folder)


def run_as_json(folder: Path) -> dict[str, Any]:
    """What `show_run` tells of a run that it can tell of."""
    line = look_at(folder)
    if line.kind == "evaluation":
        return {**shown_line(line), "report": read_evaluation(folder)}
    seen = glance(folder)
    if line.kind == "training":
        return {**shown_line(line), "round": seen.round}
    return {**shown_line(line), "arms": seen.summary, "outcome": seen.outcome}


def _show_evaluation(console: Console, folder: Path) -> None:
    try:
        report = presentable(read_evaluation(folder))
        tables = [arms_table(report), comparisons_table(report), seeds_worth_table(report)]
    except (FileNotFoundError, UnreadableError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: its report cannot be read: {error}") from error
    for table in tables:
        if table is not None:
            console.print(table)
            console.print()


def _show_growth(console: Console, folder: Path) -> None:
    seen = glance(folder)
    summary, outcome = presentable(seen.summary), presentable(seen.outcome)
    try:
        if summary:
            console.print(summary_table(summary, "score"))
        seeds = presentable(kept_seeds(seen))
        if seeds:
            console.print()
            console.print(seeds_table(seeds, "score"))
        if outcome:
            console.print()
            say(console, growth_in_words(outcome, seeds))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: its summary is damaged: {error}") from error


def _show_training(console: Console, folder: Path) -> None:
    row = glance(folder).round
    table = plain_table("the latest round", "", "")
    table.columns[2].justify, table.columns[2].no_wrap = "left", False
    for name, quantity in POLICY.items():
        value = number(row, name)
        table.add_row(quantity.label, shown(value, ",.4g"), f"[dim]{quantity.meaning}[/]")
    console.print(table)
    if row.get("anomalies"):
        say(console, f"\nanomalies: {plain(row['anomalies'])}")
