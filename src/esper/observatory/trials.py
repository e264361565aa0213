"""What a search of settings has tried: the rows of its trials, and its tables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from esper.observatory.reading import Lines, Row
from esper.observatory.run_directory import METRICS
from esper.observatory.terminal import plain_table, say, shown

TRIAL = "trial"  # the kind of a row; its `round` is the number of the trial, from 0
COMPLETE = "complete"
SHOWN = 5  # of the best trials
# Columns of a row that are not settings.
MEASURED = ("round", "kind", "state", "val_score", "params", "train_macs", "scores")


def read_trials(folder: Path) -> list[Row]:
    """Raises FileNotFoundError or UnreadableError."""
    with Lines(folder / METRICS) as lines:
        return [row for row in lines.rows() if row.get("kind") == TRIAL]


def best_trial(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first of the best that were played to their end; None if there is none."""
    complete = [row for row in rows if row["state"] == COMPLETE]
    return max(complete, key=lambda row: row["val_score"], default=None)


def show_trials(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """The best trials, and how the best one differs from where the search began."""
    best = best_trial(rows)
    if best is None:
        say(console, f"{_counted(rows)}, none of them to its end.")
        return
    table = plain_table("trial", "validation", "parameters", "training, 10^6 multiply-adds")
    complete = sorted(
        (row for row in rows if row["state"] == COMPLETE), key=lambda row: -row["val_score"]
    )
    start = [rows[0]] if rows[0] not in complete[:SHOWN] else []
    for row in (*complete[:SHOWN], *start):
        macs = row["train_macs"]
        table.add_row(
            f"{row['round'] + 1}{', the start' if row is rows[0] else ''}",
            shown(row["val_score"], ".2f"),
            shown(row["params"], ",.0f"),
            shown(None if macs is None else macs / 1e6, ",.0f"),
        )
    console.print(table)
    console.print()
    table = plain_table("setting", "start", f"trial {best['round'] + 1}")
    for name in (name for name in best if name not in MEASURED):
        table.add_row(name, _value(rows[0][name]), _value(best[name]))
    console.print(table)
    console.print()
    say(
        console,
        f"{_counted(rows)}. The best is the best by chance, too: only data that chose nothing says "
        "what it is worth.",
    )


def _counted(rows: Sequence[Mapping[str, Any]]) -> str:
    states = Counter(row["state"] for row in rows)
    each = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return f"{len(rows)} trials" + (f": {each}" if each else "")


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
