"""`esper train ppo` as a user meets it: a process, its output and its exit code."""

import io
import json
import os
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from rich.console import Console
from torch.profiler import ProfilerActivity

from command_support import esper_here, start_esper
from esper.api import resume_ppo
from esper.cli.train_command import Interrupts
from esper.leyline import ConfigError
from esper.simic.telemetry import profiler
from esper.simic.training.loop import Hooks
from training_support import rows, same_run, tiny_run, tiny_task

SMALL = ["--envs", "1", "--steps", "1", "--task", "digits"]


def ended(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate()
    return process.returncode, output


def wait_for(process: subprocess.Popen, path: Path) -> None:
    while process.poll() is None and not path.exists():
        time.sleep(0.02)


def test_a_run_can_be_stopped_with_ctrl_c_resumed_and_used(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    process = start_esper("train", "ppo", *SMALL, "--rounds", "100000", "--out", str(run))
    wait_for(process, run / "checkpoints" / "round-000001")
    process.send_signal(signal.SIGINT)
    code, output = ended(process)
    assert code == 0
    assert "finishing the round" in output
    assert f"--resume {run}" in output.replace("\n", "")
    played = len(rows(run / "outcomes.jsonl"))
    newest = sorted((run / "checkpoints").iterdir())[-1].name
    assert newest == f"round-{played:06d}"

    more = ["--resume", str(run), "--rounds", str(played + 1)]
    assert esper_here(monkeypatch, "train", "ppo", *more) == 0
    output = capsys.readouterr().out
    for word in (f"round {played + 1}/{played + 1}", "return", "entropy", "KL", "steps/s", "left"):
        assert word in output
    assert len(rows(run / "outcomes.jsonl")) == played + 1

    grow = ["--steps", "1", "--no-compare", "--out", str(tmp_path / "grown")]
    assert esper_here(monkeypatch, "grow", "--controller", str(run), *grow) == 0
    (outcome,) = rows(tmp_path / "grown" / "outcomes.jsonl")
    assert outcome["controller"] == str(run)


def test_the_second_ctrl_c_leaves_the_round_which_is_played_again(tmp_path):
    console = Console(file=io.StringIO())
    with Interrupts(console) as interrupts:

        def step(number: int) -> None:
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            interrupts.after_step()
            if number == 5:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            tiny_run(tmp_path / "left", rounds=2, hooks=Hooks(on_step=step))
    assert len(rows(tmp_path / "left" / "metrics.jsonl")) == 4 * (1 + 6)
    resume_ppo(tmp_path / "left", task=tiny_task())
    tiny_run(tmp_path / "whole", rounds=2)
    same_run(tmp_path / "whole", tmp_path / "left")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--reward", "shapd"], "did you mean shaped?"),
        (["--learning-rate", "-1"], "learning_rate must be positive"),
        (["--resume", "nowhere"], "nowhere is not the folder of a training run"),
        (["--resume", "nowhere", "--envs", "3"], "leave out envs"),
        (["--resume", "nowhere", "--gamma", "0.9", "--out", "x"], "leave out ppo.gamma, out"),
        (["--task", "nothing"], "no task 'nothing'"),
        ([*SMALL, "--slots", "blocks.9"], "no module 'blocks.9'"),
        ([*SMALL, "--slots", "blocks.0,blocks.0"], "names a module twice"),
        (["--family", "digits:mixed", "--batch", "8"], "leave out batch"),
        (["--config", "bad.toml"], "did you mean rounds?"),
        (["--device", "cpu,cuda:99"], "no device 'cuda:99'; torch finds cpu"),
        (["--device", "toaster"], "no device 'toaster'"),
        (["--device", "cpu,"], "no device ''"),
        (["--device", "cpu", "--workers", "2"], "leave out workers"),
        (["--workers", "0"], "workers must be auto or a whole number from 1, got '0'"),
        (["--workers", "many"], "workers must be auto or a whole number from 1, got 'many'"),
        (["--profile", "3", "--rounds", "3"], "round 3 cannot be profiled"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_exit_code_2(
    tmp_path, monkeypatch, capsys, arguments, sentence
):
    (tmp_path / "bad.toml").write_text("round = 3")
    monkeypatch.chdir(tmp_path)
    assert esper_here(monkeypatch, "train", "ppo", *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("esper: ")
    assert sentence in said
    assert said.count("\n") == 1
    assert os.listdir(tmp_path) == ["bad.toml"]


def test_a_run_is_not_overwritten_by_accident(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    for name in ("config.toml", ".lock"):
        (tmp_path / "run" / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert esper_here(monkeypatch, "train", "ppo", *SMALL, "--out", "run") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "config.toml"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The folder in which `esper train ppo --profile 1 --out run` was started."""
    folder = tmp_path_factory.mktemp("profiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        flags = ["--envs", "1", "--steps", "4", "--rounds", "2", "--profile", "1", "--out", "run"]
        assert esper_here(patch, "train", "ppo", *flags) == 0
    return folder


def spans(path: Path) -> list[str]:
    return [e["name"] for e in json.loads(path.read_text())["traceEvents"] if "dur" in e]


def test_004_m16_the_traces_of_a_round_lie_in_the_folder_of_the_run(profiled):
    names = sorted(path.name for path in (profiled / "run" / "profile").iterdir())
    assert names == ["round-000001-play.json", "round-000001-update.json"]
    assert [path.name for path in profiled.iterdir()] == ["run"]


def test_traces_show_phases_and_what_torch_did_in_them(profiled):
    folder = profiled / "run" / "profile"
    play, update = (spans(folder / f"round-000001-{part}.json") for part in ("play", "update"))
    # The warm-up, and the first two of four steps.
    assert play.count("hosts") == 1 + 2
    assert {"policy", "reward", "telemetry", "aten::conv2d"} <= set(play)
    assert "update" not in play
    assert {"update", "aten::lstm"} <= set(update)
    assert "hosts" not in update


def test_to_profile_changes_nothing_else(profiled, tmp_path, monkeypatch):
    flags = ["--envs", "1", "--steps", "4", "--rounds", "2", "--out", str(tmp_path / "run")]
    assert esper_here(monkeypatch, "train", "ppo", *flags) == 0
    same_run(tmp_path / "run", profiled / "run")
    assert not (tmp_path / "run" / "profile").exists()


def test_004_m15_a_trace_is_of_all_that_this_machine_has(tmp_path, monkeypatch):
    asked, make = [], profiler.profile

    def spy(activities, **options):
        asked.append(set(activities))
        return make(activities=[ProfilerActivity.CPU], **options)

    has = {ProfilerActivity.CPU, ProfilerActivity.XPU}
    monkeypatch.setattr(profiler, "supported_activities", lambda: has)
    monkeypatch.setattr(profiler, "profile", spy)
    tiny_run(tmp_path / "run", rounds=1, profile=0)
    assert asked == [has, has]


def test_a_round_that_was_played_already_cannot_be_profiled(tmp_path):
    tiny_run(tmp_path / "run", rounds=1)
    with pytest.raises(ConfigError, match="round 0 cannot be profiled: the rounds to play are 1"):
        resume_ppo(tmp_path / "run", task=tiny_task(), rounds=2, profile=0)


def test_slots_batch_and_seeds_are_flags_of_training_and_of_growing(tmp_path, monkeypatch):
    flags = ["--slots", "blocks.2,blocks.0", "--batch", "600", "--max-seeds", "1", "--steps", "3"]
    small = ["--rounds", "1", "--envs", "1", "--out", "run"]
    assert esper_here(monkeypatch, "train", "ppo", *flags, *small, cwd=tmp_path) == 0
    own = ["--controller", "run", "--no-compare", "--out", "grown"]
    assert esper_here(monkeypatch, "grow", *flags, *own, cwd=tmp_path) == 0
    # A policy for two slots, in a network with two slots.
    for folder in ("run", "grown"):
        row = rows(tmp_path / folder / "metrics.jsonl")[0]
        assert {"blocks.0.stage", "blocks.2.stage"} <= row.keys()
        assert "blocks.1.stage" not in row
    config = tomllib.loads((tmp_path / "grown" / "config.toml").read_text())
    assert (config["slots"], config["batch"], config["max_seeds"]) == ("blocks.2,blocks.0", 600, 1)
