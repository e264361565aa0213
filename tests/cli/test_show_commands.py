"""`esper compare` and `esper query` on run directories that the tests write."""

import json
from pathlib import Path

import pytest

from command_support import esper_here
from view_support import outcome, write_run


def test_compare_prints_a_line_per_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(Path(name), [outcome()])
    assert esper_here(monkeypatch, "compare", "a", "b") == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 4
    assert "90.0" in lines[-1]
    assert "2.0/1.0/1.0" in lines[-1]


def test_query_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [outcome()])
    sql = "select task, params, [germinated, culled] as seeds from outcomes"
    assert esper_here(monkeypatch, "query", str(run), sql) == 0
    assert capsys.readouterr().out.split() == [
        "task",
        "params",
        "seeds",
        "digits",
        "500",
        "[2,",
        "1]",
    ]


def test_query_needs_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert esper_here(monkeypatch, "query", str(tmp_path), "select 1") == 2


def test_tasks_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert esper_here(monkeypatch, "tasks", "--json", cwd=tmp_path) == 0
    found = {row["task"]: row for row in json.loads(capsys.readouterr().out)}
    assert (found["digits"]["data"], found["cifar10"]["data"]) == ("embedded", "missing")
    assert {"epochs", "description"} <= set(found["digits"])


def test_control_characters_in_answers_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", [outcome(controller="\x1b]0;owned\x07")])
    sql = "select controller, chr(8238) || 'x' as chr from outcomes"
    assert esper_here(monkeypatch, "query", "run", sql, cwd=tmp_path) == 0
    assert r"\u001b]0;owned\u0007" in (said := capsys.readouterr().out)
    assert r"\u202ex" in said
    assert "\x1b" not in said
    assert esper_here(monkeypatch, "query", "run", "select '\x1b'::int", cwd=tmp_path) == 2
    assert "\x1b" not in capsys.readouterr().err
