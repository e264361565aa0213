"""`esper runs` and `esper show` on run directories that the tests write."""

import json
from pathlib import Path

import pytest

from command_support import esper_here
from esper.observatory.describe import describe
from esper.observatory.report import as_html
from view_support import write_evaluation_folder, write_growth, write_training


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_growth(tmp_path / "runs" / "grown")
    write_training(tmp_path / "runs" / "trained", rounds=2, planned=4)
    write_evaluation_folder(tmp_path / "runs" / "evaluated")
    return tmp_path


def test_runs_lists_what_is_there(runs, monkeypatch, capsys):
    assert esper_here(monkeypatch, "runs", cwd=runs) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"run", "grown", "trained", "evaluated"}
    assert lines["grown"].endswith("finished")
    assert "12/12" in lines["grown"]
    assert lines["trained"].endswith("stopped")
    assert esper_here(monkeypatch, "runs", "--json", cwd=runs) == 0
    told = {line["id"]: line for line in json.loads(capsys.readouterr().out)}
    assert told["trained"]["done"] == 2
    assert told["trained"]["state"] == "stopped"
    assert told["evaluated"]["test_score"] == 91.0


def test_runs_without_a_folder_or_runs(tmp_path, monkeypatch, capsys):
    assert esper_here(monkeypatch, "runs", cwd=tmp_path) == 2
    assert "there is no folder runs" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    assert esper_here(monkeypatch, "runs", cwd=tmp_path) == 0
    assert "no runs in runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("runs/grown", ["growth, finished", "conv_light in blocks.0 (r0c0)", "1 seed planted"]),
        ("runs/trained", ["training, stopped", "2/4 rounds", "entropy", "0.5"]),
        ("runs/evaluated", ["evaluation, finished", "heuristic - static", "+1.00"]),
    ],
)
def test_show_sums_a_run_up_again(runs, run, words, monkeypatch, capsys):
    assert esper_here(monkeypatch, "show", run, cwd=runs) == 0
    shown = capsys.readouterr().out
    for word in words:
        assert word in shown


def test_show_refuses_what_is_no_run(tmp_path, monkeypatch, capsys):
    assert esper_here(monkeypatch, "show", str(tmp_path)) == 2
    assert "neither a run nor an evaluation" in capsys.readouterr().err


def test_names_of_runs_cannot_command_the_terminal(tmp_path, monkeypatch, capsys):
    write_growth(tmp_path / "runs" / "[bold]\x1b]0;owned\x07", task="\x1b[31m\u202e")
    for words in (["runs"], ["show", "runs/[bold]\x1b]0;owned\x07"]):
        assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "[bold]" in shown


def test_grow_ends_with_a_report_of_a_finished_run(tmp_path, monkeypatch, capsys):
    words = ("grow", "--steps", "2", "--controller", "static", "--no-compare", "--out", "run")
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == "report   run/report.html"
    assert '"state":"finished"' in (tmp_path / "run" / "report.html").read_text()
    assert esper_here(monkeypatch, *words, "--overwrite", cwd=tmp_path) == 0


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


DAMAGE = {
    "deep-lists": ("config.toml", f"a = {nested(5000)}"),
    "deep-tables": ("config.toml", f"{'a.' * 5000}a = 1"),
    "long-number": ("config.toml", f"steps = {'9' * 5000}"),
    "long-text": ("config.toml", f'task = "{"x" * 1_000_000}"'),
    "no-text": ("config.toml", "\0\0\0"),
    "deep-summary": ("summary.json", nested(100)),
    "number-in-summary": ("summary.json", f'[{{"arm": "grown", "params": {"9" * 5000}}}]'),
    "wrong-summary": ("summary.json", '[{"arm": [], "seeds": [{"params": {}}]}, 3]'),
    "deep-row": ("metrics.jsonl", f'{{"step": 1, "val_score": {nested(200)}}}\n'),
    "wrong-row": ("metrics.jsonl", '{"kind": [], "step": {}, "blocks.0.stage": []}\n'),
    "long-row": ("metrics.jsonl", f'{{"step": 1, "a": "{"x" * 3_000_000}"}}\n'),
    "wrong-outcome": ("outcomes.jsonl", '{"ended": [], "seeds": {"a": 1}, "val_score": "x"}\n'),
    "wrong-report": ("evaluation.json", '{"task": "a", "arms": {"arm": 1}}'),
    "deep-report": ("evaluation.json", f'{{"task": "a", "arms": {nested(3000)}}}'),
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    write_growth(folder / "whole")
    for name, (file, text) in DAMAGE.items():
        (write_growth(folder / name) / file).write_text(text)
    return folder


def test_damaged_folders_do_not_hide_the_others(damaged, monkeypatch, capsys):
    assert esper_here(monkeypatch, "runs", ".", cwd=damaged) == 0
    assert set(DAMAGE) | {"whole"} <= set(capsys.readouterr().out.split())
    assert esper_here(monkeypatch, "runs", ".", "--json", cwd=damaged) == 0
    states = {line["name"]: line["state"] for line in json.loads(capsys.readouterr().out)}
    assert states.pop("whole") == "finished"
    assert set(states) == set(DAMAGE)
    readable = {"deep-summary", "wrong-summary", "wrong-row", "wrong-outcome"}
    assert {name for name, state in states.items() if state != "broken"} <= readable


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_shown_or_refused_in_one_sentence(damaged, name, monkeypatch, capsys):
    for words in (["show", name], ["show", name, "--json"], ["compare", name]):
        assert esper_here(monkeypatch, *words, cwd=damaged) in (0, 2)
        assert len(capsys.readouterr().err.splitlines()) <= 1
    assert "Esper" in as_html(describe(damaged / name, damaged))
