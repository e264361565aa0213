"""A run that is killed, however and however often, ends as if nothing had happened."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from esper.api.training import resume_ppo
from esper.leyline import ConfigError
from esper.simic.training.loop import Hooks
from resume_support import was_killed
from training_support import rows, same_run, start_run, tiny_run, tiny_task


def play_with_kills(folder: Path, rounds: int, plans: list[str], **flags: Any) -> None:
    """`plans` as in `start_run`, or 'time:0.1': so many seconds after the first row is written."""
    whole, killed = folder / "whole", folder / "killed"
    tiny_run(whole, rounds=rounds, **flags)
    for plan in plans:
        child = start_run(killed, rounds, plan, **flags)
        if plan.startswith("time"):
            kill_while_playing(child, killed, float(plan.partition(":")[2]))
        assert was_killed(child), plan
    assert not was_killed(start_run(killed, rounds, **flags))
    same_run(whole, killed)


def kill_while_playing(child: int, run: Path, seconds: float) -> None:
    metrics = run / "metrics.jsonl"
    before, end = metrics.stat().st_mtime_ns if metrics.exists() else 0, time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_mtime_ns > before):
        assert time.monotonic() < end, "nothing was written"
        time.sleep(0.005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("population", "plans"),
    [("looped", ["write:4", "step:13"]), ("fused", ["time:0.05", "rename:1"])],
)
def test_kills_change_nothing(tmp_path, population, plans):
    play_with_kills(tmp_path, 3, plans, population=population)


def test_a_kill_changes_nothing_with_a_network_over_sets(tmp_path):
    play_with_kills(tmp_path, 2, ["step:11"], **{"network.kind": "set"})


@pytest.mark.soak
@pytest.mark.parametrize("population", ["looped", "fused"])
def test_twenty_kills_at_random_moments_change_nothing(tmp_path, population):
    draw = random.Random(0)
    plans = []
    for _ in range(20):
        kind = draw.choice(["step", "write", "rename", "time"])
        # A process lives for two rounds at most, so that there is something left to kill.
        most = {"step": 15, "write": 6, "rename": 2}
        count = draw.random() / 4 if kind == "time" else draw.randint(1, most[kind])
        plans.append(f"{kind}:{count}")
    play_with_kills(tmp_path, 44, plans, population=population)


def test_a_run_that_was_stopped_after_a_round_goes_on_exactly(tmp_path):
    tiny_run(tmp_path / "whole")
    rounds_seen = []
    tiny_run(
        tmp_path / "stopped",
        hooks=Hooks(
            on_round=lambda number, row, timing: rounds_seen.append(number),
            stop=lambda: len(rounds_seen) == 1,
        ),
    )
    assert rounds_seen == [0]
    resume_ppo(tmp_path / "stopped", task=tiny_task())
    same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_run_that_is_recorded_in_detail_is_so_after_a_resume(tmp_path):
    """What anomalies of earlier rounds set off goes on: closer looks, and what is told once."""
    wild = {"rounds": 4, "ppo.learning_rate": 0.3, "ppo.target_kl": 100.0}
    tiny_run(tmp_path / "whole", **wild)
    played = []
    hooks = Hooks(lambda number, row, timing: played.append(number), stop=lambda: played == [0, 1])
    state = tiny_run(tmp_path / "stopped", hooks=hooks, **wild)
    assert state.escalation.detailed
    resume_ppo(tmp_path / "stopped", task=tiny_task())
    found = rows(tmp_path / "stopped" / "metrics.jsonl")
    assert any(row["kind"] == "layer" and row["round"] == 2 for row in found)
    same_run(tmp_path / "whole", tmp_path / "stopped")


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("played") / "run"
    tiny_run(folder, rounds=1)
    return folder


@pytest.fixture
def run(played, tmp_path) -> Path:
    """A run of one round."""
    return shutil.copytree(played, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", "6"),
        ("envs", "5"),
        ("growth.incubation", '"joint"'),
        ("growth.population", '"looped"'),
        ("growth.precision", '"bf16"'),
        ("growth.steps", "4"),
        ("growth.max_seeds", "2"),
        ("ppo.learning_rate", "0.1"),
        ("network.lstm_hidden_dim", "8"),
        ("network.op_bias.CULL", "1.5"),
        ("reward_mode", '"shaped"'),
        ("reward.param_cost", "0.5"),
    ],
)
def test_a_setting_that_was_changed_is_refused_by_its_name(run, name, value):
    config = run / "config.toml"
    other = (f"{name} =", "reward = {}")
    kept = [line for line in config.read_text().splitlines() if not line.startswith(other)]
    config.write_text("\n".join([f"{name} = {value}", *kept]) + "\n")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=rf"{name} in .* was changed from") as error:
        resume_ppo(run, task=tiny_task(), rounds=2)
    assert "\n" not in str(error.value)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert before == after


def test_more_rounds_can_be_asked_for_later(run):
    state = resume_ppo(run, task=tiny_task(), rounds=2)
    assert state.round == 2
    assert "rounds = 2" in (run / "config.toml").read_text()


def test_a_history_that_was_cut_is_refused(run):
    os.truncate(run / "outcomes.jsonl", 10)
    with pytest.raises(ConfigError, match=r"outcomes\.jsonl is shorter"):
        resume_ppo(run, task=tiny_task(), rounds=2)


def test_other_slots_than_before_are_refused(run):
    with pytest.raises(ConfigError, match="other slots or blueprints"):
        resume_ppo(run, rounds=2)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.toml"):
        resume_ppo(tmp_path)
