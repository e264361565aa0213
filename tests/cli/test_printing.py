"""`--quiet` and `--json`: the result and nothing else, and the same record as without them."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from command_support import esper_here
from esper.cli import app
from esper.simic.recordings.episodes import load_episodes
from esper.simic.recordings.imitation import CloningConfig
from esper.simic.recordings.offline import OfflineConfig

GROW = ("grow", "--steps", "2", "--no-compare", "--controller", "static")
EVALUATE = ("evaluate", "--arms", "static", "--keys", "1", "--steps", "1", "--no-controls")


@pytest.mark.parametrize(
    ("words", "folder", "shown"),
    [
        (GROW, "digits-static-0", "test accuracy"),
        (EVALUATE, "evaluate-digits", "1 paired keys, 1 epochs."),
    ],
)
def test_quiet_prints_the_result_and_no_paths(
    words: tuple[str, ...],
    folder: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert esper_here(monkeypatch, *words, "--quiet", cwd=tmp_path) == 0
    printed = capsys.readouterr()
    assert shown in printed.out
    assert folder not in printed.out
    assert "validation " not in printed.out
    assert printed.err == ""
    assert (tmp_path / "runs" / folder / "report.html").exists()


def test_grow_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert esper_here(monkeypatch, *GROW, "--json", cwd=tmp_path) == 0
    printed = capsys.readouterr()
    found, run = json.loads(printed.out), tmp_path / "runs" / "digits-static-0"
    assert found["out"] == str(run.relative_to(tmp_path))
    assert found["arms"] == json.loads((run / "summary.json").read_text())
    assert "model.pt2" in printed.err
    config = tomllib.loads((run / "config.toml").read_text())
    assert "steps" in config
    assert not {"quiet", "json"} & set(config)


def test_evaluate_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert esper_here(monkeypatch, *EVALUATE, "--json", "--quiet", cwd=tmp_path) == 0
    printed = capsys.readouterr()
    written = tmp_path / "runs" / "evaluate-digits" / "evaluation.json"
    assert json.loads(printed.out) == json.loads(written.read_text())
    assert printed.err == ""


# Commands without a result: what they print comes while they run.
WITHOUT = {
    "watch": "a screen of its own until it is left",
    "serve": "says where the page is, and runs until it is stopped",
}


def every_command(group: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        is_group = hasattr(command, "commands")
        if is_group:
            yield from every_command(command, *names, name)
        if not is_group or command.invoke_without_command:
            yield " ".join((*names, name)), command


def test_every_command_that_prints_a_result_has_both() -> None:
    found = dict(every_command(typer.main.get_command(app)))
    assert {"grow", "train ppo", "policies", "policies show", "data get"} <= set(found)
    for name, command in found.items():
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert ({"--quiet", "--json"} <= flags) == (name not in WITHOUT), name


def test_results_of_the_small_commands_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(*words: str) -> Any:
        assert esper_here(monkeypatch, *words, "--json", "--quiet", cwd=tmp_path) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return json.loads(printed.out)

    run, outcomes = "runs/r", tmp_path / "runs" / "r" / "outcomes.jsonl"
    recorded = result("train", "record", "--episodes", "2", "--steps", "1", "--out", run)
    episodes = load_episodes(tmp_path / run)
    assert recorded == {
        "out": run,
        "episodes": 2,
        "steps": 2,
        "mean_return": recorded["mean_return"],
    }
    assert recorded["mean_return"] == pytest.approx(episodes.rewards.sum() / 2)
    assert [row["id"] for row in result("runs", "runs")] == ["r"]
    assert result("show", run)["state"] == "finished"
    assert result("compare", run)[0]["episodes"] == 2
    keys = [json.loads(line)["key"] for line in outcomes.open()]
    sql = "select env, key, 'nan'::double as nothing from outcomes order by env"
    assert result("query", run, sql) == [
        {"env": env, "key": key, "nothing": None} for env, key in enumerate(keys)
    ]
    assert result("report", run) == {"report": f"{run}/report.html"}
    listed = result("data", "list")
    assert {"data_set": "digits", "state": "embedded"}.items() <= listed["data_sets"][0].items()
    assert result("data", "get", "digits")["state"] == "embedded"
    bottleneck = {row["blueprint"]: row for row in result("blueprints")}["bottleneck"]
    assert "cnn" in bottleneck["fits"]
    assert isinstance(result("policies"), list)


def test_results_of_learning_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(*words: str) -> Any:
        assert esper_here(monkeypatch, "train", *words, "--json", cwd=tmp_path) == 0
        return json.loads(capsys.readouterr().out)

    brief = OfflineConfig(steps=20, policy=CloningConfig(epochs=1))
    monkeypatch.setattr("esper.api.recordings.OfflineConfig", partial(replace, brief))
    short = ("--episodes", "2", "--steps", "1")
    cloned = result("imitate", "--from", "static", *short, "--epochs", "1", "--out", "c")
    assert cloned["held_out"]["always_wait"] == 1.0
    assert result("offline", "--episodes", "c", "--out", "o")["episodes"] == 2
    learnt = result("ppo", "--envs", "2", "--steps", "1", "--rounds", "1", "--out", "p")
    assert (learnt["out"], learnt["rounds"], learnt["rounds_wanted"]) == ("p", 1, 1)
    config = tomllib.loads((tmp_path / "c" / "config.toml").read_text())
    assert not {"quiet", "json"} & set(config)
    rows = [json.loads(line) for line in (tmp_path / "p" / "metrics.jsonl").open()]
    (row,) = [row for row in rows if row["kind"] == "round"]
    assert learnt["return"] == row["return"]
