"""`esper evaluate` from the outside: files, tables, and one sentence for bad input."""

import csv
import json
from pathlib import Path

import pytest

from command_support import esper_here


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
    assert '"state":"finished"' in (out / "report.html").read_text()
    shown = capsys.readouterr().out
    assert "random - static" in shown
    assert "All arms used the learning rate 0.01." in shown
    # A second evaluation does not silently replace the first.
    assert esper_here(monkeypatch, *words) == 2
    assert "already holds an evaluation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--task", "nothing"], "no task 'nothing'"),
        (["--arms", "static,oracle"], "no controller 'oracle'"),
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
