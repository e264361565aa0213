"""Episodes of hosts of a family, and those that a training run keeps."""

from pathlib import Path

import numpy as np
import pytest

from esper.api import resume_ppo
from esper.leyline import OP, ConfigError, LifecycleOp
from esper.simic.recordings.episodes import load_episodes, record_episodes
from esper.simic.training.checkpoint import load_checkpoint
from esper.simic.training.env_specs import episode_key
from esper.tamiyo.controllers import make_controller
from training_support import break_at_birth, rows, tiny_config, tiny_family, tiny_run, tiny_task


def test_a_run_keeps_what_it_learnt_from(tmp_path: Path) -> None:
    state = tiny_run(tmp_path / "run", rounds=2, keep_episodes=True)
    kept, told = load_episodes(tmp_path / "run"), rows(tmp_path / "run" / "outcomes.jsonl")
    assert kept.space == state.space
    assert len(kept) == len(told) == 8
    by_env = sorted(told, key=lambda row: (row["round"], row["env"]))
    assert kept.returns == pytest.approx([row["total_reward"] for row in by_env])
    assert kept.lengths.tolist() == [row["steps"] for row in by_env]
    steps = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "step"]
    steps.sort(key=lambda row: (row["round"], row["env"], row["step"]))
    ops = [LifecycleOp(op).name for op in kept.actions[..., OP][kept.valid]]
    assert ops == [row["op"] for row in steps if row["step"] > 0]


def test_a_round_that_is_played_again_leaves_the_same(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny_run(whole, rounds=2, keep_episodes=True)
    tiny_run(parts, rounds=1, keep_episodes=True)
    resume_ppo(parts, task=tiny_task(), rounds=2)
    assert load_checkpoint(parts).state.round == 2
    for file in (whole / "episodes").iterdir():
        assert file.read_bytes() == (parts / "episodes" / file.name).read_bytes()


def test_a_run_that_keeps_none_says_so(tmp_path: Path) -> None:
    tiny_run(tmp_path / "run", rounds=1)
    with pytest.raises(ConfigError, match="holds no recorded episodes"):
        load_episodes(tmp_path / "run")


def test_a_host_that_breaks_while_it_warms_up_has_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, random = tiny_task(), make_controller("random")
    every = record_episodes(tiny_config(), task, task.load(tmp_path), random, episodes=3)
    break_at_birth(monkeypatch, env=1)
    fewer = record_episodes(tiny_config(), task, task.load(tmp_path), random, episodes=3)
    assert len(fewer) == 2
    assert np.array_equal(fewer.rewards, every.rewards[[0, 2]])


def test_episodes_of_a_family_are_those_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    config = tiny_config(group=2, reward_mode="budget", **{"network.kind": "set"})
    family, task = tiny_family(starts=("trained",)), tiny_task()
    random = make_controller("random")
    episodes = record_episodes(config, task, task.load(tmp_path), random, episodes=5, family=family)
    assert len(episodes) == 5
    first = episodes.observations[:, 0]
    assert np.array_equal(first[0], first[1]), "a group begins with one host"
    assert not np.array_equal(first[0], first[2])
    # The key of a group chooses the member.
    members = [family.episode("train", episode_key(config.key, n, 0))[0].number for n in range(3)]
    assert episodes.hosts.tolist() == [*[members[0]] * 2, *[members[1]] * 2, members[2]]
    assert len(set(members)) > 1
