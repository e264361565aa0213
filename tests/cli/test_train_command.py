"""`esper train ppo` as a user meets it: a process, its output and its exit code."""

import io
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from command_support import esper_here, start_esper
from esper.api import resume_ppo
from esper.cli.train_command import Interrupts, LeaveRoundError
from esper.simic.training.loop import Hooks
from training_support import rows, same_run, tiny_run, tiny_task

SMALL = ["--envs", "1", "--steps", "1", "--task", "digits"]


def ended(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate()
    return process.returncode, output


def wait_for(process: subprocess.Popen, path: Path) -> None:
    while process.poll() is None and not path.exists():
        time.sleep(0.02)


def test_a_run_can_be_stopped_with_ctrl_c_resumed_and_used(tmp_path):
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

    code, output = ended(
        start_esper("train", "ppo", "--resume", str(run), "--rounds", str(played + 1))
    )
    assert code == 0
    for word in (f"round {played + 1}/{played + 1}", "return", "entropy", "KL", "steps/s", "left"):
        assert word in output
    assert len(rows(run / "outcomes.jsonl")) == played + 1

    grow = ["--steps", "1", "--no-compare", "--out", str(tmp_path / "grown")]
    code, output = ended(start_esper("grow", "--task", "digits", "--controller", str(run), *grow))
    assert code == 0, output
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

        with pytest.raises(LeaveRoundError):
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
        (["--config", "bad.toml"], "did you mean rounds?"),
        (["--devices", "cpu,cuda:99"], "no device 'cuda:99'; torch finds cpu"),
        (["--devices", "toaster"], "no device 'toaster'"),
        (["--devices", "cpu,"], "no device ''"),
        (["--devices", "cpu", "--workers", "2"], "leave out workers"),
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
    (tmp_path / "run" / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert esper_here(monkeypatch, "train", "ppo", *SMALL, "--out", "run") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert os.listdir(tmp_path / "run") == ["config.toml"]
