"""`--dry-run` says what would be done, and does nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from command_support import esper_here
from esper.cli.rehearsal import BATCHES, little_of, rehearsed
from esper.proof import host_size, training_macs
from esper.tamiyo import StaticController
from esper.tolaria import TrialRules, data_root, find_task

EVALUATE = ("evaluate", "--arms", "static,scripted:early", "--keys", "2", "--tuning-keys", "1")


def dry_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    *words: str,
) -> dict[str, Any]:
    before = sorted(folder.rglob("*"))
    assert esper_here(monkeypatch, *words, "--dry-run", "--json", cwd=folder) == 0
    assert sorted(folder.rglob("*")) == before
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "would", "out"),
    [
        (
            ("grow", "--steps", "2", "--controller", "scripted:early"),
            "train digits for 3 epochs: grown, host alone, from scratch",
            "runs/digits-scripted-early-0",
        ),
        (
            ("grow", "--steps", "8", "--start", "trained", "--no-compare"),
            "train digits for 9 epochs: trained host, grown",
            "runs/digits-heuristic-0",
        ),
        (
            ("train", "record", "--episodes", "5", "--steps", "2"),
            "record 5 episodes of 2 steps of random on digits, fused",
            "runs/recorded-digits-0",
        ),
        (
            ("train", "ppo", "--rounds", "7", "--envs", "2", "--steps", "2"),
            "play 7 rounds of 2 episodes on digits (looped, 1 workers), 2 decisions each",
            "runs/ppo-digits-0",
        ),
    ],
)
def test_it_says_what_would_run_and_leaves_nothing(
    words: tuple[str, ...],
    would: str,
    out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = dry_run(monkeypatch, capsys, tmp_path, *words)
    assert (told["would"], told["out"]) == (would, out)
    assert told["seconds"] > 0
    assert told["memory_bytes"] > 50e6  # torch alone takes more
    assert "timed" in told["how"]


def test_an_evaluation_trains_as_many_networks_as_it_was_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*EVALUATE, "--steps", "1")
    told = dry_run(monkeypatch, capsys, tmp_path, *words)
    assert esper_here(monkeypatch, *words, "--quiet", cwd=tmp_path) == 0
    lines = (tmp_path / told["out"] / "runs.jsonl").read_text().splitlines()
    trained = sum("outcome" in json.loads(line) for line in lines)
    assert told["would"].startswith(f"train {trained} networks on digits, looped: ")


def test_what_is_left_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("--envs", "2", "--steps", "1", "--out", "run")
    assert esper_here(monkeypatch, "train", "ppo", "--rounds", "1", *short, cwd=tmp_path) == 0
    capsys.readouterr()
    told = dry_run(
        monkeypatch, capsys, tmp_path, "train", "ppo", "--resume", "run", "--rounds", "4"
    )
    assert told["would"].startswith("play 3 rounds of 2 episodes")


def test_what_cannot_be_known_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "ppo", "--family", "digits:mixed", "--network", "set")
    told = dry_run(monkeypatch, capsys, tmp_path, *words)
    assert told["seconds"] is None
    assert told["memory_bytes"] is None
    assert "family" in told["how"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("grow", "--out", "taken"), "taken holds a config.toml that is of no run"),
        (("grow", "--task", "nosuch"), "no task 'nosuch'"),
        (("train", "record", "--out", "taken"), "taken holds a config.toml that is of no run"),
        (("train", "ppo", "--out", "taken"), "taken holds a config.toml that is of no run"),
        ((*EVALUATE, "--resume"), "leave out --resume"),
        ((*EVALUATE, "--out", "evaluated"), "evaluated already holds an evaluation"),
    ],
)
def test_bad_input_is_found_as_it_would_be(
    words: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("taken/config.toml", "evaluated/settings.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    assert esper_here(monkeypatch, *words, "--dry-run", cwd=tmp_path) == 2
    assert complaint in capsys.readouterr().err


def test_a_little_of_the_data_costs_its_share_and_has_no_test_part() -> None:
    task = find_task("digits")
    data = task.load(data_root())
    little, factor = little_of(task, data)
    assert len(little.train_x) == BATCHES * task.batch
    assert factor == pytest.approx(len(data.train_x) / len(little.train_x))
    assert torch.equal(little.test_x, data.val_x[: len(little.test_x)])
    _, macs = rehearsed(task, data, StaticController(), TrialRules(2), 0)
    assert macs == pytest.approx(training_macs(task, data, host_size(task, data)[1], 2), rel=0.02)
