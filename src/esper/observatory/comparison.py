"""Comparison of runs: a table of their outcomes, curves, and differences on shared keys."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from rich.markup import escape
from rich.table import Table

from esper.leyline import ConfigError
from esper.observatory.describe import MAX_ROWS, round_columns, score_curve
from esper.observatory.formatting import format_columns, format_number, mean_of, sanitize
from esper.observatory.reading import Row, UnreadableError, number, open_rows, read_json
from esper.observatory.run_directory import METRICS, OUTCOMES, SUMMARY, read_rows
from esper.observatory.runs import read_run
from esper.observatory.terminal import plain_table

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
