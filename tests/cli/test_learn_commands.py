"""`esper train record`, `imitate` and `offline`: policies that everything else can use."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import esper
from command_support import esper_here
from esper.simic.recordings.episodes import load_episodes
from esper.simic.recordings.imitation import CloningConfig
from esper.simic.recordings.offline import OfflineConfig
from esper.simic.training.checkpoint import load_state
from esper.simic.training.config import load_config
from esper.simic.training.state import new_state

SHORT = ("--episodes", "3", "--steps", "2")


def test_a_clone_is_a_policy_an_arm_a_start_for_ppo_and_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloned = tmp_path / "cloned"
    words = ("train", "imitate", "--from", "scripted:early", *SHORT, "--epochs", "2")
    assert esper_here(monkeypatch, *words, "--out", str(cloned)) == 0
    assert "Agreement with the teacher on 2 held-out steps" in capsys.readouterr().out
    assert esper.load_policy(cloned).name == str(cloned)

    outcomes = [json.loads(line) for line in (cloned / "outcomes.jsonl").open()]
    assert [row["controller"] for row in outcomes] == ["scripted:early"] * 3
    rows = [json.loads(line) for line in (cloned / "metrics.jsonl").open()]
    (report,) = [row for row in rows if row["kind"] == "imitation"]
    assert 0 <= report["agreement.overall"] <= 1

    state = load_state(cloned)
    warm = new_state(load_config(None, {"task": "digits"}), state.space, state)
    for name, parameter in warm.agent.network.named_parameters():
        assert torch.equal(parameter, state.agent.network.get_parameter(name))
    assert warm.observations.count > 1

    out = tmp_path / "evaluation"
    words = ("evaluate", "--arms", f"static,{cloned}", "--keys", "1", "--steps", "1")
    assert esper_here(monkeypatch, *words, "--no-controls", "--out", str(out)) == 0
    report = json.loads((out / "evaluation.json").read_text())
    assert [row["arm"] for row in report["arms"]] == ["static", str(cloned)]

    learnt = tmp_path / "offline"
    brief = OfflineConfig(steps=20, policy=CloningConfig(epochs=1))
    monkeypatch.setattr("esper.api.recordings.OfflineConfig", partial(replace, brief))
    words = ("train", "offline", "--episodes", str(cloned), "--episodes", str(cloned))
    assert esper_here(monkeypatch, *words, "--out", str(learnt)) == 0
    assert "6 episodes, 12 steps" in capsys.readouterr().out
    esper.load_policy(learnt)


def test_record_leaves_episodes_and_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "recorded"
    words = ("train", "record", "--controller", "random", *SHORT, "--out", str(run))
    assert esper_here(monkeypatch, *words) == 0
    assert len(load_episodes(run)) == 3
    assert esper_here(monkeypatch, *words) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (
        esper_here(monkeypatch, "evaluate", "--arms", str(run), "--out", str(tmp_path / "e")) == 2
    )
    assert "no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("imitate", "--from", "oracle"), "no controller 'oracle'"),
        (("imitate", "--task", "nothing"), "no task 'nothing'"),
        (("record", "--controller", "scripted:unheard-of"), "no script"),
        (("offline", "--episodes", "nowhere"), "no recorded episodes"),
        (("offline", "--episodes", "nowhere", "--expectile", "2"), "expectile must"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_run(
    words: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert esper_here(monkeypatch, "train", *words, "--out", str(out)) == 2
    assert sentence in capsys.readouterr().err
    assert not out.exists()


def test_a_clone_over_sets_is_a_policy_that_offline_learning_and_ppo_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloned, learnt, trained = (tmp_path / name for name in ("cloned", "learnt", "trained"))
    words = ("train", "imitate", "--from", "scripted:early", *SHORT, "--epochs", "1")
    assert esper_here(monkeypatch, *words, "--network", "graph") == 2
    assert "network must be 'flat' or 'set'" in capsys.readouterr().err
    assert esper_here(monkeypatch, *words, "--network", "set", "--out", str(cloned)) == 0
    brief = OfflineConfig(steps=5, policy=CloningConfig(epochs=1))
    monkeypatch.setattr("esper.api.recordings.OfflineConfig", partial(replace, brief))
    words = ("train", "offline", "--episodes", str(cloned), "--out", str(learnt))
    assert esper_here(monkeypatch, *words) == 0
    words = ("train", "ppo", "--network", "set", "--warm-start", str(learnt), "--out", str(trained))
    assert esper_here(monkeypatch, *words, "--rounds", "1", "--envs", "2", "--steps", "2") == 0
    assert {load_state(run).space.kind for run in (cloned, learnt, trained)} == {"set"}
