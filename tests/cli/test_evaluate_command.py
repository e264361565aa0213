"""`esper evaluate` from the outside: files, tables, and one sentence for bad input."""

import csv
import json
import shlex
import signal
from pathlib import Path

import pytest

from command_support import esper_here, start_esper
from esper.observatory.describe import describe
from esper.observatory.evaluation import evaluation_folder
from esper.proof import evaluation


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
    assert '"state":"finished"' in (out / "report.html").read_text()
    shown = capsys.readouterr().out
    assert "random - static" in shown
    assert "All arms used the learning rate 0.01." in shown
    # Two pairs: the smallest p-value is 2 / 2^2.
    told = "smallest possible p-value is 0.5"
    assert told in " ".join(shown.split())
    assert told in (out / "report.html").read_text()
    assert esper_here(monkeypatch, "show", str(out)) == 0
    assert told in " ".join(capsys.readouterr().out.split())
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
        (["--control-for", "oracle"], "oracle"),
        (["--task", "cifar10", "--arms", "static"], "cifar10"),
        (["--scenario", "dreams"], "scenario must be scratch, trained or depth, got 'dreams'"),
        (["--extra", "0.3"], "extra budgets are for trained hosts"),
        (["--scenario", "trained", "--extra", "0.1,much"], "extra must be numbers"),
        (["--scenario", "trained", "--extra", ""], "extra must be numbers"),
        (["--scenario", "trained", "--extra", "0"], "above 0, such as 0.1,0.3; got 0.0"),
        (["--scenario", "trained", "--extra", "-1,0.3"], "above 0"),
        (["--scenario", "trained", "--extra", "nan"], "above 0"),
        (["--scenario", "trained", "--extra", "inf"], "above 0"),
        (["--scenario", "trained", "--extra", "0.3,0.1"], "extra must ascend, got 0.3, 0.1"),
        (["--scenario", "trained", "--arms", "static"], "arm continue"),
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


WORDS = ["evaluate", "--arms", "static,random", "--keys", "2", "--steps", "1", "--no-controls"]


def results(out: Path) -> list[object]:
    """Everything that was found, but not how long it took."""
    report = json.loads((out / "evaluation.json").read_text())
    rows = list(csv.DictReader((out / "trials.csv").open()))
    for row in (*report["arms"], *report["trials"], *rows):
        del row["cpu_seconds"]
    return [report, rows]


def test_what_is_killed_is_resumed_with_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(*words: str) -> int:
        """Networks that were trained: one line for each, where there is no terminal."""
        assert esper_here(monkeypatch, *WORDS, *words, cwd=tmp_path) == 0
        return sum("M mult" in line for line in capsys.readouterr().out.splitlines())

    assert trained("--out", "whole") == 4
    process = start_esper(*WORDS, "--out", "killed", cwd=tmp_path)
    assert process.stdout is not None
    for _ in range(2):
        assert "validation" in process.stdout.readline()
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "evaluation.json").exists()
    assert trained("--out", "killed", "--resume") <= 2, "saved networks were trained again"
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


def test_what_cannot_be_resumed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "--arms", "static", "--keys", "1", "--steps", "1", "--out", "out"]

    def refusal(*more: str) -> str:
        assert esper_here(monkeypatch, *words, *more, cwd=tmp_path) == 2
        return capsys.readouterr().err

    assert "out holds no evaluation to resume; leave out --resume" in refusal("--resume")
    assert not (tmp_path / "out").exists()
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
    capsys.readouterr()
    assert "has steps 1, not 2" in refusal("--resume", "--steps", "2")
    assert "give one" in refusal("--resume", "--overwrite")
    with evaluation_folder(tmp_path / "out", overwrite=False, resume=True):
        assert "out is in use by another run" in refusal("--resume")


def test_a_scenario_prints_a_table_for_each_extra_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "TUNING_KEYS", 1)
    words = ["evaluate", "--scenario", "trained", "--extra", "0.5,1", "--arms", "random"]
    words += ["--keys", "2", "--steps", "4", "--out", "out"]
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
    shown = capsys.readouterr().out
    for extra in ("0.5", "1"):
        assert f"Extra compute budget: {extra} of the host's training" in shown
    assert shown.count("random - continue-cooled") == 2
    assert shown.count("random is ahead") == 1
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert report["crossover"] in " ".join(shown.split())
    again = shlex.split(describe(tmp_path / "out")["reproduce"])
    for flag, value in (("--scenario", "trained"), ("--extra", "0.5,1"), ("--arms", "random")):
        assert again[again.index(flag) + 1] == value
