"""Groups of environments with the same host, of one task or drawn from a family."""

from pathlib import Path

import numpy as np
import pytest

from esper.api.training import resume_ppo, train_ppo
from esper.leyline import ConfigError
from esper.simic.training import workers
from esper.simic.training.config import load_config
from esper.simic.training.env_specs import ShardSpec, episode_key, most_steps
from esper.simic.training.round_log import RoundLog
from esper.simic.training.shard import Shard
from esper.tamiyo.controllers.simple import RandomController
from esper.tamiyo.situation import wait
from training_support import (
    REMEDIES,
    InProcessConnection,
    family_run,
    plant_wherever_possible,
    rows,
    same_run,
    tiny_config,
    tiny_family,
    tiny_spec,
)

FAMILY = tiny_family()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One folder for the hosts that all tests here are on."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def at_home(root, monkeypatch):
    monkeypatch.setenv("ESPER_DATA", str(root))


def family_shard(**flags) -> Shard:
    config = tiny_config(**{"group": 2, "reward_mode": "budget", "key": 1, **flags})
    data = FAMILY.task.load(Path("unused"))
    return Shard(ShardSpec(config, FAMILY.task, data, (0, 1, 2, 3), family=FAMILY), RoundLog())


def played(shard: Shard, act) -> list[tuple]:
    """All that a round gives, step by step, with the actions of `act(step, batch)`."""
    found = [shard.reset(0)]
    for step in range(most_steps(shard.spec.config, FAMILY.task, shard.spec.data, FAMILY)):
        found.append(shard.step(np.concatenate([act(step, batch) for batch in shard.batches])))
    return found


def by_chance(step, batch):
    """By the key of the episode; all of a group do the same."""
    chosen = RandomController().act(batch.situation) if batch.env.running.any() else wait(2)
    return np.repeat(chosen[:1], 2, axis=0)


def test_in_a_group_only_actions_make_a_difference():
    shard = family_shard()
    assert shard.groups.tolist() == [0, 0, 1, 1]
    found = played(shard, by_chance)
    assert len(shard.batches) == 2
    observations = np.stack([each[0] for each in found])
    assert np.array_equal(observations[:, 0], observations[:, 1])
    assert np.array_equal(observations[:, 2], observations[:, 3])
    assert not np.array_equal(observations[:, 0], observations[:, 2])
    rewards = np.stack([each[2] for each in found[1:]])
    assert np.array_equal(rewards[:, ::2], rewards[:, 1::2])
    assert all(not batch.env.running.any() for batch in shard.batches)


def test_environments_of_one_task_can_be_grouped_too():
    shard = Shard(tiny_spec(tiny_config(group=2), (0, 1, 2, 3)), RoundLog())
    observations, _ = shard.reset(0)
    assert len(shard.batches) == 1
    assert np.array_equal(observations[0], observations[1])
    assert not np.array_equal(observations[0], observations[2])


def test_the_same_round_has_the_same_hosts_and_another_has_others():
    shard = family_shard()
    keys = []
    for round_ in (0, 1, 0):
        shard.reset(round_)
        keys.append([batch.spec.keys[0] for batch in shard.batches])
    assert keys[0] == keys[2] != keys[1]


def test_no_host_of_a_family_has_more_seeds_at_a_time_than_the_run_allows():
    held = []

    def plant(step, batch):
        held.append(batch.env.table.holds_seed.sum(axis=1).max())
        return plant_wherever_possible(batch.situation)

    played(family_shard(max_seeds=1), plant)
    assert max(held) == 1


def test_every_episode_fits_into_the_buffer():
    data = FAMILY.task.load(Path("unused"))
    most = most_steps(tiny_config(), FAMILY.task, data, FAMILY)
    assert most == max(m.steps(data) for m in FAMILY.members("train"))


def test_rewards_add_up_to_what_is_left_behind():
    shard = family_shard(**{"reward.param_cost": 1.0})
    began = {}

    def act(step, batch):
        if step == 0:
            for env, score in enumerate(batch.situation.signals.val_score.tolist()):
                began[batch.spec.rows.start + env] = score
        return by_chance(step, batch)

    found = played(shard, act)
    total = sum(each[2] for each in found[1:])
    outcomes = {outcome.env: outcome for outcome in shard.log.outcomes}
    cost = shard.spec.config.reward_config.param_cost
    for env in range(4):
        o = outcomes[env]
        grown = (o.params - o.host_params) / o.host_params
        assert total[env] == pytest.approx((o.val_score - began[env]) / 100 - cost * grown)
        assert total[env] == pytest.approx(o.total_reward)
    grew = [row for row in shard.log.rows if row.get("reward.params")]
    assert grew, "nobody has tried anything"


def test_workers_change_nothing_and_neither_does_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "ProcessConnection", InProcessConnection)
    family_run(tmp_path / "one", rounds=2, **REMEDIES)
    family_run(tmp_path / "two", rounds=2, workers=2, **REMEDIES)
    same_run(tmp_path / "one", tmp_path / "two")
    family_run(tmp_path / "three", rounds=1, **REMEDIES)
    resume_ppo(tmp_path / "three", rounds=2, family=FAMILY)
    same_run(tmp_path / "one", tmp_path / "three")
    outcomes = rows(tmp_path / "one" / "outcomes.jsonl")
    assert sorted(o["env"] for o in outcomes) == sorted([*range(4)] * 2)


def test_a_family_brings_its_task_its_groups_and_its_reward():
    config = load_config(flags={"family": "digits:trained", "envs": 16})
    assert (config.task, config.group, config.reward_mode) == ("digits", 8, "budget")
    assert config.network.kind == "set"
    assert load_config(flags={"family": "digits:trained", "group": 4}).group == 4
    assert load_config().group == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"family": "digits:no"}, "there are digits:mixed"),
        ({"family": "digits:trained", "task": "pydocs"}, "task 'digits', not 'pydocs'"),
        ({"family": "digits:trained", "growth.steps": 5}, "leave out steps"),
        ({"envs": 6, "group": 4}, "6 environments .* groups of 4"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        load_config(flags=flags)


def test_hosts_of_different_depth_are_played_together_by_a_network_over_sets_only(tmp_path):
    deep = tiny_family(name="digits:depths", widths=((1, 3), (2, 6), (2, 6)), blocks=(2, 3))
    settings = {"group": 2, "rounds": 1, "network.kind": "set", "reward_mode": "budget"}
    train_ppo(tiny_config(**settings), tmp_path / "run", family=deep)
    drawn = [deep.episode("train", episode_key(5, 0, group))[0] for group in range(2)]
    assert {len(member.widths) for member in drawn} == {2, 3}
    assert len(rows(tmp_path / "run" / "outcomes.jsonl")) == 4
    with pytest.raises(ConfigError, match="have 2 to 3 slots"):
        train_ppo(tiny_config(group=2), tmp_path / "other", family=deep)


def test_a_task_beside_a_family_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="leave out task"):
        train_ppo(tiny_config(), tmp_path / "run", family=FAMILY, task=FAMILY.task)
