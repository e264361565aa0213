"""Some growth environments in one process: rewards by mode, ends, records by the run's numbers."""

import numpy as np
import pytest
import torch

from esper.leyline import SeedStage
from esper.leyline.events import GovernorSnapshot, HostStabilized, RewardHackingSuspected
from esper.simic.rewards.modes import compute_reward
from esper.simic.training import shard as shard_module
from esper.simic.training.round_log import RoundLog
from esper.simic.training.shard import Shard
from esper.simic.training.state import new_state
from esper.tamiyo.situation import wait
from esper.tolaria.engine.run import settle
from reward_support import one_seed, transition
from training_support import (
    break_at_birth,
    plant_wherever_possible,
    rows,
    tiny_config,
    tiny_run,
    tiny_spec,
)


def make_shard(envs=(5,), device="cpu", **flags) -> Shard:
    shard = Shard(tiny_spec(tiny_config(**flags), envs, device), RoundLog())
    shard.reset(0)
    return shard


@pytest.fixture
def shard() -> Shard:
    """One environment, the sixth of its run."""
    return make_shard(**{"ppo.gamma": 0.9})


def test_004_c1_rewards_of_a_run_are_shaped_with_the_gamma_of_its_agent(shard, monkeypatch):
    asked = []

    def spy(step, config, gamma):
        asked.append(gamma)
        return compute_reward(step, config, gamma)

    monkeypatch.setattr(shard_module, "compute_reward", spy)
    shard.step(wait(1))
    agent = new_state(shard.spec.config, shard.space).agent
    assert asked == [agent.config.gamma] == [0.9]


@pytest.fixture
def suspicious(monkeypatch) -> None:
    """Every step looks like reward hacking."""
    before = one_seed(SeedStage.BLENDING, n=1)
    after = one_seed(SeedStage.BLENDING, n=2, c=2.0, gained=-0.5)

    def suspect(step, config, gamma):
        return compute_reward(transition(before, after), config, gamma)

    monkeypatch.setattr(shard_module, "compute_reward", suspect)


def test_004_h9_suspicions_reach_the_record_of_a_training_run(shard, suspicious):
    shard.step(wait(1))
    (event,) = [e for e in shard.log.events if isinstance(e, RewardHackingSuspected)]
    assert (event.env, event.slot_id, event.severity) == (5, "r0c0", "critical")


@pytest.mark.parametrize("cap", [1, None])
def test_no_host_has_more_seeds_at_a_time_than_the_run_allows(cap):
    shard, held = make_shard(envs=(0, 1), max_seeds=cap), []
    (batch,) = shard.batches
    for _ in range(4):
        shard.step(plant_wherever_possible(batch.situation))
        held.append(batch.env.table.holds_seed.sum(axis=1).max())
    assert max(held) == (cap or len(shard.spec.task.slots))


def test_suspicions_come_after_the_events_of_their_step_and_before_those_of_the_end(
    suspicious, monkeypatch
):
    def settle_with_event(env, envs, **names):
        env.recorder.event(HostStabilized(0, 1, 0.5))
        return settle(env, envs, **names)

    shard = make_shard(steps=1)
    monkeypatch.setattr(shard_module, "settle", settle_with_event)
    shard.log.clear()
    shard.step(wait(1))
    kinds = (GovernorSnapshot, RewardHackingSuspected, HostStabilized)
    found = [type(event) for event in shard.log.events if isinstance(event, kinds)]
    assert found == list(kinds)


def test_hosts_are_on_the_device_of_their_shard():
    # Not the default: it has an index.
    assert make_shard(device="cpu:0").batches[0].env.population.device == torch.device("cpu:0")


def test_the_last_epoch_ends_the_episode_for_the_learner():
    """Nothing follows that counts, so the critic must not be asked what would."""
    shard = make_shard(envs=(0, 1), steps=3)
    flags = [shard.step(wait(2))[3:] for _ in range(3)]
    ended = [terminated.tolist() for terminated, _ in flags]
    assert ended == [[False] * 2, [False] * 2, [True] * 2]
    assert not any(truncated.any() for _, truncated in flags)


def test_a_host_that_breaks_at_birth_beside_others_ends_with_the_first_step(tmp_path, monkeypatch):
    break_at_birth(monkeypatch, env=1)
    shard = make_shard(envs=(0, 1, 2))
    ended = [shard.step(wait(3))[3].tolist() for _ in range(2)]
    assert ended == [[False, True, False], [False] * 3]
    # The learner gets one step of it, without a reward, and all of the others.
    tiny_run(tmp_path / "run", rounds=1)
    (row,) = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "round"]
    assert row["steps"] == 3 * 8 + 1
    outcomes = rows(tmp_path / "run" / "outcomes.jsonl")
    assert [(o["env"], o["ended"]) for o in outcomes if o["env"] == 1] == [(1, "rollback")]
    assert sorted(o["env"] for o in outcomes) == [0, 1, 2, 3]


def test_records_are_told_in_the_order_of_environments_by_their_numbers_in_the_run():
    log = RoundLog()
    shard = Shard(tiny_spec(tiny_config(steps=1), (3, 7)), log)
    shard.reset(0)
    shard.step(wait(2))
    assert [(row["step"], row["env"]) for row in log.rows] == [(0, 3), (0, 7), (1, 3), (1, 7)]
    assert [outcome.env for outcome in log.outcomes] == [3, 7]
    assert {event.env for event in log.events} == {3, 7}


def test_002_high1_what_is_timed_is_on_the_host_when_the_clock_stops(shard):
    """Arrays of NumPy cannot be waiting for a device."""
    observations, masks, *rest = shard.step(wait(1))
    arrays = [observations, masks.op, masks.slot, masks.blueprint, masks.blend, *rest]
    assert all(isinstance(array, np.ndarray) for array in arrays)
