"""`esper compare` and `esper query` on run directories that the tests write."""

import json
from pathlib import Path
from typing import Any

import pytest

from command_support import esper_here
from esper.leyline import ConfigError
from esper.observatory.comparison import compare_runs
from esper.observatory.query import query


def outcome(**changes: Any) -> dict[str, Any]:
    row = {"task": "digits", "controller": "random", "val_score": 90.0, "params": 500}
    row |= {"macs": 10, "train_macs": 2_000_000, "germinated": 2, "fossilized": 1, "culled": 1}
    return row | {"rollbacks": 0, "total_reward": 0.1} | changes


def write_run(path: Path, outcomes: list[dict[str, Any]], tail: str = "") -> Path:
    path.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in outcomes)
    (path / "outcomes.jsonl").write_text(lines + tail)
    (path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"kind": "step", "step": i, "r0c0.stage": "DORMANT", "val_score": 1.5 * i})
            + "\n"
            for i in range(4)
        )
    )
    (path / "events.jsonl").write_text("")
    return path


def test_compare_averages_and_shows_where_a_run_got_to(tmp_path: Path) -> None:
    learning = [outcome(val_score=float(50 + i), total_reward=None) for i in range(20)]
    one = write_run(tmp_path / "one", learning)
    two = write_run(tmp_path / "two", [outcome(), outcome(controller="static", params=700)])
    (two / "summary.json").write_text(json.dumps([{"arm": "grown", "test_score": 93.5}]))
    first, second = compare_runs([one, two])
    assert (first["episodes"], first["val_score"], first["late_val_score"]) == (20, 59.5, 68.5)
    assert first["total_reward"] is None
    assert (second["controller"], second["params"], second["test_score"]) == ("several", 600, 93.5)


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


@pytest.mark.parametrize("make", ["nothing", "empty", "broken"])
def test_compare_refuses_what_is_no_run(tmp_path: Path, make: str) -> None:
    if make != "nothing":
        (tmp_path / "outcomes.jsonl").write_text("" if make == "empty" else "{]\n")
    expected = {"nothing": "not a run", "empty": "no outcome yet", "broken": "damaged"}[make]
    with pytest.raises(ConfigError, match=expected):
        compare_runs([tmp_path])


def test_query_reads_the_tables_and_leaves_out_an_unfinished_line(tmp_path: Path) -> None:
    rows = [outcome(params=500 + i) for i in range(3)]
    run = write_run(tmp_path / "run", rows, tail='{"params": 99')
    answer = query(run, "select count(*) as n, max(params) as most from outcomes")
    assert answer.columns == ("n", "most")
    assert answer.rows == [(3, 502)]
    assert query(run, 'select "r0c0.stage", val_score from metrics where step = 2').rows == [
        ("DORMANT", 3.0)
    ]


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


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("selekt 1", "does not work"),
        ("select nothing from outcomes", "does not work: .*nothing"),
        ("select * from events", "does not work: .*events"),
        ("drop table outcomes", "only read"),
        ("select 1; select 2", "only read"),
        ("copy outcomes to 'stolen.csv'", "only read"),
        ("", "only read"),
        ("select * from read_text('/etc/hostname')", "does not work"),
    ],
)
def test_sql_that_is_wrong_or_does_more_than_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", [outcome()])
    before = {path: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(ConfigError, match=message) as caught:
        query(run, sql)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    assert not (tmp_path / "stolen.csv").exists()


def test_query_needs_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert esper_here(monkeypatch, "query", str(tmp_path), "select 1") == 2
