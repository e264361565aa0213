"""The long run of the benchmark is one that the views can open, and the benchmark itself runs."""

from pathlib import Path

import pytest

import views
from esper.observatory.describe import describe


def test_the_long_run_is_read_as_a_run(tmp_path: Path):
    views.write_long_run(tmp_path / "long", 3000)
    data = describe(tmp_path / "long", round_=2, env=5)
    assert data["run"]["state"] == "finished"
    assert data["rounds"]["round"] == list(range(3000 // (16 * 31)))
    assert len(data["environments"]) == 16
    assert [frame["step"] for frame in data["episode"]["frames"]] == list(range(31))


def test_long_runs_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "ENVS", 1)
    monkeypatch.setattr(views, "STEPS", 1)
    views.write_long_run(tmp_path / "long", 2 * 1000)
    data = describe(tmp_path / "long")
    rounds = data["rounds"]["round"]
    assert len(rounds) <= 401
    assert rounds[-1] == 999
    assert rounds == sorted(set(rounds))


@pytest.mark.soak
def test_the_benchmark_runs():
    result = views.main(["--rows", "5000", "--clients", "5", "--repeats", "1"])
    assert result["data_kb"] > 10
    assert result["writer"]["alone_cpu_seconds"] > 0
