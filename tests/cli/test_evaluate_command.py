"""`esper evaluate` from the outside: files, tables, and one sentence for bad input."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from command_support import esper_here
from esper.leyline import ConfigError
from esper.observatory.evaluation import arms_table, comparisons_table, draw_evaluation
from esper.tolaria.tasks import all_tasks


def test_writes_json_csv_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "evaluation"
    words = ["evaluate", "--arms", "static, random", "--keys", "2", "--steps", "1"]
    words += ["--no-controls", "--out", str(out)]
    assert esper_here(monkeypatch, *words) == 0
    report = json.loads((out / "evaluation.json").read_text())
    assert [row["arm"] for row in report["arms"]] == ["static", "random"]
    assert report["keys"] == [0, 1]
    rows = list(csv.DictReader((out / "trials.csv").open()))
    assert [(row["arm"], row["key"]) for row in rows] == [
        ("static", "0"),
        ("random", "0"),
        ("static", "1"),
        ("random", "1"),
    ]
    assert [float(row["test_score"]) for row in rows] == [
        trial["test_score"] for trial in report["trials"]
    ]
    assert (out / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "random - static" in shown
    assert "All arms used the learning rate 0.01." in shown
    # A second evaluation does not silently replace the first.
    assert esper_here(monkeypatch, *words) == 2
    assert "already holds an evaluation" in capsys.readouterr().err


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


def test_one_arm_alone_is_drawn_without_comparisons(tmp_path: Path) -> None:
    arm = {"arm": "static", "control_of": None, "width": None, "test_score": 90.0}
    arm |= {"params": 496, "train_macs": 1e6}
    report = {
        "task": "digits",
        "score": "accuracy",
        "keys": [0],
        "arms": [arm],
        "comparisons": [],
        "trials": [{"arm": "static", "test_score": 90.0}],
    }
    assert draw_evaluation(tmp_path / "plot.png", report).stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--task", "nothing"], "no task 'nothing'"),
        (["--arms", "static,oracle"], "no arm 'oracle'"),
        (["--arms", "scripted:unheard-of"], "no script 'unheard-of'"),
        (["--arms", ""], "at least one arm"),
        (["--arms", "static,static"], "more than once"),
        (["--control-for", "oracle"], "not among the arms"),
        (["--task", "cifar10", "--arms", "static"], "cifar10"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_run(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "no-data"))
    out = tmp_path / "out"
    assert esper_here(monkeypatch, "evaluate", *words, "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert not out.exists()


@pytest.mark.parametrize("name", [n for n, task in all_tasks().items() if task.widths])
def test_families_hold_the_host_itself_and_grow_with_width(name: str) -> None:
    task = all_tasks()[name]
    assert task.host_of_width is not None

    def size(module: object) -> int:
        return sum(p.numel() for p in module.parameters())  # type: ignore[attr-defined]

    sizes = [size(task.host_of_width(width)) for width in task.widths]
    assert sizes == sorted(set(sizes))
    assert size(task.build()) in sizes


def test_a_family_needs_its_widths() -> None:
    with pytest.raises(ConfigError, match="both host_of_width and widths"):
        replace(all_tasks()["digits"], widths=())
