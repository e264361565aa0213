import csv
import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from esper.observatory.evaluation import (
    arms_table,
    comparisons_table,
    kept_seeds_table,
    write_evaluation,
)


def test_the_tables_fit_into_eighty_columns() -> None:
    names = ["scripted:early", "static-final-equal-compute", "best-static-equal-compute"]
    numbers = {"test_score": 93.25, "params": 2064.4, "macs": 12345.6, "train_macs": 1.2e9}
    numbers |= {"cpu_seconds": 12.3, "germinated": 9.5, "fossilized": 2.5, "culled": 10.4}
    arms = [{"arm": n, **numbers, "rollbacks": 0.0, "learning_rate": 0.00333} for n in names]
    row = {"arm": names[0], "versus": names[1], "mean": -1.234, "low": -10.5, "high": 2.5}
    report = {
        "score": "accuracy",
        "arms": arms,
        "comparisons": [row | {"p_holm": 0.0001}, row | {"low": None, "p_holm": None}],
    }
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(arms_table(report))
    console.print(comparisons_table(report))
    text = console.export_text()
    assert len(text.splitlines()) == 2 + 3 + 1 + 2, text
    for words in (*names, "93.25", "2,064", "12,346", "1,200", "9.5/2.5/10", "0.0033"):
        assert words in text
    for words in ("-1.23", "-10.50 … +2.50", "< 0.001"):
        assert words in text


def report_with_seeds(arm: str) -> dict[str, Any]:
    """Two keys; on both a branch was kept, on one a norm as well, whose worth nobody measured."""
    branch = {"blueprint": "branch", "module": "layer1", "slot_id": "r0c0", "params": 490}
    norm = {"blueprint": "norm", "module": "blocks.0", "slot_id": "r0c1", "params": 5}
    trials: list[dict[str, Any]] = [
        {"seeds": [branch | {"contribution": 8.0, "shapley": 6.0}]},
        {"seeds": [branch | {"contribution": 4.0, "shapley": 3.0}, norm | {"shapley": None}]},
    ]
    numbers = {"control_of": None, "width": None, "params": 496, "macs": 1, "train_macs": 1e6}
    numbers |= {"test_score": 90.0, "learning_rate": 0.01}
    return {
        "task": "digits",
        "score": "accuracy",
        "keys": [0, 1],
        "arms": [{"arm": name, **numbers} for name in ("static", arm)],
        "comparisons": [],
        "trials": [{"arm": "static", "key": 0, "test_score": 89.0, "seeds": []}]
        + [{"arm": arm, "key": i, "test_score": 90.0} | trial for i, trial in enumerate(trials)],
    }


def test_the_worth_of_seeds_is_averaged_over_the_keys_that_kept_them() -> None:
    arm = "runs/x[/]y"
    report = report_with_seeds(arm)
    table = kept_seeds_table(report)
    assert table is not None
    console = Console(width=120, record=True)
    console.print(table)
    _, branch, norm, caption = console.export_text().splitlines()
    assert branch.split() == [
        "runs/x[/]y",
        *["branch", "in", "layer1", "(r0c0)", "2/2", "+6.00", "+4.50"],
    ]
    assert norm.split() == [arm, "norm", "in", "blocks.0", "(r0c1)", "1/2", "-", "-"]
    assert caption.strip() == "in points of validation accuracy"
    for trial in report["trials"]:
        trial.pop("seeds")
    assert kept_seeds_table(report) is None


def test_files_take_names_of_users_as_they_are_and_a_cell_holds_no_list(tmp_path: Path) -> None:
    report = report_with_seeds("runs/$x$[/]y")
    write_evaluation(tmp_path, report)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == report
    rows = list(csv.DictReader((tmp_path / "trials.csv").open()))
    assert [row["arm"] for row in rows] == ["static", "runs/$x$[/]y", "runs/$x$[/]y"]
    assert "seeds" not in rows[0]
