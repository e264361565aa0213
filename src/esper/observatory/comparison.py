"""Run directories side by side: one line of their outcomes each."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from esper.leyline import ConfigError
from esper.observatory.run_directory import OUTCOMES, SUMMARY, read_rows
from esper.observatory.terminal import plain_table, shown

AVERAGED = (
    "val_score", "params", "macs", "train_macs", "germinated", "fossilized", "culled", "rollbacks",
)  # fmt: skip
LATE = 0.1  # share of the episodes, at the end, that shows where a run that learns has got to


def compare_runs(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Means over the episodes of every run; `late_val_score` over the last tenth of them.

    `test_score` is that of the run's own network, where the run ended with a test of it. Raises
    ConfigError for a folder that holds no outcomes.
    """
    return [_summarise(run) for run in runs]


def _summarise(run: Path) -> dict[str, Any]:
    if not (run / OUTCOMES).is_file():
        raise ConfigError(f"{run} is not a run directory: it has no {OUTCOMES}")
    try:
        rows = list(read_rows(run / OUTCOMES))
    except ValueError as error:
        raise ConfigError(f"{run / OUTCOMES} is damaged: {error}") from error
    for number, row in enumerate(rows, start=1):
        _check_outcome(run / OUTCOMES, number, row)
    if not rows:
        raise ConfigError(f"{run} holds no outcome yet; no episode of it has ended")
    late = rows[-max(1, round(LATE * len(rows))) :]
    return {
        "run": str(run),
        "task": _one_of(rows, "task"),
        "controller": _one_of(rows, "controller"),
        "episodes": len(rows),
        **{name: _mean(rows, name) for name in AVERAGED},
        "late_val_score": _mean(late, "val_score"),
        "total_reward": _mean(rows, "total_reward"),
        "test_score": _test_score(run),
    }


def _check_outcome(path: Path, number: int, row: Any) -> None:
    """Raises ConfigError for a row that cannot be averaged."""
    if not isinstance(row, dict):
        raise ConfigError(f"{path} is damaged: row {number} is not an outcome")
    for name in (*AVERAGED, "total_reward"):
        value = row.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{path} is damaged: {name} of row {number} is not a number")


def _one_of(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    values = {str(row.get(name)) for row in rows}
    return values.pop() if len(values) == 1 else "several"


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def _test_score(run: Path) -> float | None:
    if not (run / SUMMARY).is_file():
        return None
    try:
        arms = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{run / SUMMARY} is damaged: {error}") from error
    if not isinstance(arms, list) or not all(isinstance(row, dict) for row in arms):
        raise ConfigError(f"{run / SUMMARY} is damaged: it is not a list of arms")
    score = next((row.get("test_score") for row in arms if row.get("arm") == "grown"), None)
    if score is not None and not isinstance(score, int | float):
        raise ConfigError(f"{run / SUMMARY} is damaged: the test_score is not a number")
    return score


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = plain_table(
        "\nrun",
        "epi-\nsodes",
        "vali-\ndation",
        "last\ntenth",
        "\ntest",
        "\nreturn",
        "\nparams",
        "train\n10^6",
        "seeds/kept\n/culled",
        "roll\nback",
        gap=1,
    )
    for row in rows:
        counts = (row["germinated"], row["fossilized"], row["culled"])
        work = row["train_macs"]
        table.add_row(
            escape(row["run"]),
            str(row["episodes"]),
            shown(row["val_score"], ".1f"),
            shown(row["late_val_score"], ".1f"),
            shown(row["test_score"], ".1f"),
            shown(row["total_reward"], "+.3f"),
            shown(row["params"], ",.0f"),
            shown(None if work is None else work / 1e6, ",.0f"),
            "/".join(shown(count, ".1f") for count in counts),
            shown(row["rollbacks"], ".1f"),
        )
    return table
