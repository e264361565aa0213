import json
from pathlib import Path

import pytest
from rich.console import Console

from esper.leyline import ConfigError
from esper.observatory.summaries import compare_runs, comparison_table
from view_support import outcome, write_run


def test_compare_averages_and_shows_where_a_run_got_to(tmp_path: Path) -> None:
    learning = [outcome(val_score=float(50 + i), total_reward=None) for i in range(20)]
    one = write_run(tmp_path / "one", learning)
    two = write_run(tmp_path / "two", [outcome(), outcome(controller="static", params=700)])
    (two / "summary.json").write_text(json.dumps([{"arm": "grown", "test_score": 93.5}]))
    first, second = compare_runs([one, two])
    assert (first["episodes"], first["val_score"], first["late_val_score"]) == (20, 59.5, 68.5)
    assert first["total_reward"] is None
    assert (second["controller"], second["params"], second["test_score"]) == ("several", 600, 93.5)


def test_what_was_not_measured_is_shown_as_absent(tmp_path: Path) -> None:
    unknown = dict.fromkeys(outcome())
    write_run(tmp_path / "x[/]y", [unknown | {"task": "digits", "controller": "random"}])
    console = Console(width=200, record=True)
    console.print(comparison_table(compare_runs([tmp_path / "x[/]y"])))
    line = console.export_text().splitlines()[-1].split()
    assert line == [str(tmp_path / "x[/]y"), "1", *6 * "-", "-/-/-", "-"]


@pytest.mark.parametrize("make", ["nothing", "empty", "broken"])
def test_compare_refuses_what_is_no_run(tmp_path: Path, make: str) -> None:
    if make != "nothing":
        (tmp_path / "outcomes.jsonl").write_text("" if make == "empty" else "{]\n")
    expected = {"nothing": "not a run", "empty": "no outcome yet", "broken": "damaged"}[make]
    with pytest.raises(ConfigError, match=expected):
        compare_runs([tmp_path])


def test_a_damaged_summary_is_one_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [outcome()])
    (run / "summary.json").write_text("[{")
    with pytest.raises(ConfigError, match=r"summary\.json is damaged"):
        compare_runs([run])
