from pathlib import Path

import pytest

from esper.leyline import ConfigError
from esper.observatory.query import query
from view_support import outcome, write_run


def test_query_reads_the_tables_and_leaves_out_an_unfinished_line(tmp_path: Path) -> None:
    rows = [outcome(params=500 + i) for i in range(3)]
    run = write_run(tmp_path / "run", rows, tail='{"params": 99')
    answer = query(run, "select count(*) as n, max(params) as most from outcomes")
    assert answer.columns == ("n", "most")
    assert answer.rows == [(3, 502)]
    assert query(run, 'select "blocks.0.stage", val_score from metrics where step = 2').rows == [
        ("DORMANT", 3.0)
    ]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("selekt 1", "failed"),
        ("select nothing from outcomes", "failed: .*nothing"),
        ("select * from events", "failed: .*events"),
        ("drop table outcomes", "read-only"),
        ("select 1; select 2", "read-only"),
        ("copy outcomes to 'stolen.csv'", "read-only"),
        ("", "read-only"),
        ("select * from read_text('/etc/hostname')", "failed"),
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
