"""One loop for every environment: it learns, scales in one place, and spreads over processes."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.api.training import resume_ppo
from esper.leyline import ConfigError, NullRecorder
from esper.simic import analytic
from esper.simic.agent.rollout import play_round
from esper.simic.control import RewardNormalizer, RunningMeanStd
from esper.simic.training.clock import Clock
from esper.simic.training.config import DEFAULT_PPO, NetworkSizes, TrainingConfig
from esper.simic.training.growth_rounds import GrowthRounds
from esper.simic.training.loop import Hooks, Tally, run_training
from esper.simic.training.scaling import ScaledEnv
from esper.simic.training.state import Space, TrainState, new_state
from esper.simic.training.workers import worker_devices
from esper.tamiyo import wait
from training_support import rows, same_run, tiny_config, tiny_run, tiny_task

ANALYTIC = Space(analytic.OBSERVATION_DIM, analytic.NUM_SLOTS, ("small", "medium", "large"))


def analytic_config(key: int) -> TrainingConfig:
    return TrainingConfig(
        task="analytic",
        rounds=160,
        envs=32,
        key=key,
        network=NetworkSizes(feature_dim=32, lstm_hidden_dim=32),
        ppo=replace(
            DEFAULT_PPO,
            learning_rate=2e-3,
            gamma=0.99,
            gae_lambda=0.95,
            entropy_coef=0.2,
            entropy_coef_end=0.02,
            entropy_anneal_updates=60,
        ),
    )


def score_of(state: TrainState, envs: int = 1024) -> float:
    """Mean return of the most probable actions in episodes that were not trained on."""
    scaled = ScaledEnv(
        analytic.AnalyticGrowth(envs, key=10_000),
        _frozen(state.observations),
        {"objective": RewardNormalizer()},
        lambda env: "objective",
        Clock(),
    )
    buffer = state.agent.new_buffer(envs, analytic.HORIZON)
    play_round(state.agent, scaled, buffer, 0, None)
    return float(scaled.returns.mean())


def _frozen(statistics: RunningMeanStd) -> RunningMeanStd:
    copy = RunningMeanStd(tuple(statistics.mean.shape))
    copy.load_state_dict(statistics.state_dict())
    copy.update = lambda batch: None
    return copy


@pytest.mark.parametrize("key", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_the_analytic_problem_is_solved_to_95_percent_by_the_same_loop(key):
    config = analytic_config(key)
    optimum, scores = analytic.solve().optimum, []

    def look(number: int, row: dict, timing: dict) -> None:
        if number % 20 == 19:
            scores.append(score_of(state))

    state = new_state(config, ANALYTIC)
    run_training(
        config,
        state,
        analytic.AnalyticGrowth(config.envs, key),
        analytic.HORIZON,
        Tally(NullRecorder()),
        hooks=Hooks(on_round=look, stop=lambda: bool(scores) and scores[-1] >= 0.95 * optimum),
    )
    assert scores[-1] >= 0.95 * optimum


class Scripted:
    """Three environments with known observations and rewards; the first ends after one step."""

    num_envs = 3

    def __init__(self, rewards: np.ndarray) -> None:
        self.rewards, self.time = rewards, 0
        self.masks = analytic.AnalyticGrowth(3).reset()[1]

    def reset(self, episode: int):
        return np.full((3, 2), 5.0), self.masks

    def step(self, actions: np.ndarray):
        rewards = self.rewards[self.time]
        self.time += 1
        last = np.full(3, self.time == len(self.rewards))
        first = np.array([self.time == 1, False, False])
        return np.full((3, 2), 5.0 + self.time), self.masks, rewards, first, last & ~first


def scaled_env(rewards: np.ndarray, modes: list[str]) -> ScaledEnv:
    normalizers = {mode: RewardNormalizer() for mode in dict.fromkeys(modes)}
    return ScaledEnv(
        Scripted(rewards), RunningMeanStd((2,)), normalizers, lambda env: modes[env], Clock()
    )


def test_each_reward_mode_has_a_normaliser_of_its_own():
    rewards = np.array([[1.0, 100.0, 300.0], [9.0, 500.0, 100.0]])
    env = scaled_env(rewards, ["sparse", "shaped", "shaped"])
    env.reset(0)
    env.step(np.zeros((3, 4), dtype=int))
    *_, scaled, _, _ = env.step(np.zeros((3, 4), dtype=int))
    expected = torch.tensor([100.0, 300.0, 500.0, 100.0]).std().item()
    assert env.rewards["shaped"].std == pytest.approx(expected)
    assert scaled[1:] == pytest.approx(np.array([500.0, 100.0]) / expected)
    # The first environment ended with its first step: what comes later is not its reward.
    assert (env.rewards["sparse"].count, scaled[0]) == (1, 0.0)
    assert env.returns.tolist() == [1.0, 600.0, 400.0]


def test_observations_enter_the_statistics_before_they_are_scaled_and_only_if_acted_on():
    env = scaled_env(np.zeros((3, 3)), ["sparse"] * 3)
    observed, _ = env.reset(0)
    assert env.observations.mean.tolist() == pytest.approx([5.0, 5.0], abs=1e-3)
    assert observed == pytest.approx(np.zeros((3, 2)), abs=0.1)
    actions = np.zeros((3, 4), dtype=int)
    env.step(actions)
    assert env.observations.mean[0].item() == pytest.approx((3 * 5 + 2 * 6) / 5, abs=1e-3)
    observed, *_ = env.step(actions)
    assert observed[0].tolist() == [0.0, 0.0]
    seen = env.observations.count
    env.step(actions)
    assert env.observations.count == seen


def test_two_reward_modes_share_a_run(tmp_path):
    state = tiny_run(tmp_path / "run", rounds=2, ab_reward_mode="shaped")
    assert set(state.rewards) == {"objective", "shaped"}
    assert state.rewards["objective"].count == state.rewards["shaped"].count == 2 * 2 * 8
    outcomes = rows(tmp_path / "run" / "outcomes.jsonl")
    assert [o["reward_mode"] for o in outcomes[:4]] == ["objective"] * 2 + ["shaped"] * 2
    row = next(r for r in rows(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "round")
    both = [np.mean([o["total_reward"] for o in outcomes[i : i + 2]]) for i in (0, 2)]
    assert [row["return.objective"], row["return.shaped"]] == pytest.approx(both)


def test_the_same_key_gives_the_same_bytes_and_another_does_not(tmp_path):
    for name, key in (("a", 1), ("b", 1), ("c", 2)):
        tiny_run(tmp_path / name, rounds=1, key=key)
    same_run(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError):
        same_run(tmp_path / "a", tmp_path / "c")


def test_the_number_of_threads_before_a_run_does_not_matter(tmp_path):
    try:
        torch.set_num_threads(2)
        tiny_run(tmp_path / "a", rounds=1, **{"network.lstm_hidden_dim": 128})
        tiny_run(tmp_path / "b", rounds=1, **{"network.lstm_hidden_dim": 128})
    finally:
        torch.set_num_threads(1)
    same_run(tmp_path / "a", tmp_path / "b")


def test_workers_change_nothing_even_if_one_is_killed(tmp_path, monkeypatch, caplog):
    tiny_run(tmp_path / "one", rounds=2)
    pools, make = [], GrowthRounds.__init__

    def remember(self, *args, **settings) -> None:
        make(self, *args, **settings)
        pools.append(self)

    steps = []

    def kill(step: int) -> None:
        steps.append(step)
        if len(steps) == 11:
            os.kill(pools[0].shards[1].process.pid, signal.SIGKILL)

    monkeypatch.setattr(GrowthRounds, "__init__", remember)
    tiny_run(tmp_path / "two", rounds=2, workers=2, hooks=Hooks(on_step=kill))
    assert len(pools[0].shards) == 2
    assert "died (exit code -9); its round is played again" in caplog.text
    assert not any(shard.process.is_alive() for shard in pools[0].shards)
    same_run(tmp_path / "one", tmp_path / "two")


def test_one_worker_per_device_and_on_cpus_the_same_bits(tmp_path, monkeypatch):
    shards, make = [], GrowthRounds.__init__

    def remember(self, *args, **settings) -> None:
        make(self, *args, **settings)
        shards.append(self.shards)

    monkeypatch.setattr(GrowthRounds, "__init__", remember)
    tiny_run(tmp_path / "one", rounds=1)
    tiny_run(tmp_path / "two", rounds=1, devices=["cpu", "cpu"])
    assert [len(each) for each in shards] == [1, 2]
    same_run(tmp_path / "one", tmp_path / "two")
    # What devices a run is on is no part of it.
    resume_ppo(tmp_path / "one", task=tiny_task(), rounds=2, devices=["cpu", "cpu"])
    resume_ppo(tmp_path / "two", task=tiny_task(), rounds=2)
    same_run(tmp_path / "one", tmp_path / "two")


def test_hosts_are_on_the_device_of_their_shard():
    with GrowthRounds(tiny_config(), tiny_task(), NullRecorder(), ["cpu:0"]) as env:
        env.reset(0)
        # Not the default: it has an index.
        assert env.shards[0].shard.env.population.device == torch.device("cpu:0")


def test_devices_are_those_that_torch_finds(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert worker_devices(None, ["cuda:1", "cuda:0", "cpu"]) == ("cuda:1", "cuda:0", "cpu")
    with pytest.raises(ConfigError, match="no device 'cuda:7'; torch finds cpu, cuda:0, cuda:1"):
        worker_devices(None, ["cuda:0", "cuda:7"])


def test_workers_are_on_the_cpu_and_some_number_of_them():
    assert worker_devices(None, None) == ("cpu",)
    assert worker_devices(3, None) == ("cpu", "cpu", "cpu")
    with pytest.raises(ConfigError, match="at least one worker, got 0"):
        worker_devices(0, None)
    with pytest.raises(ConfigError, match="list of devices is empty"):
        worker_devices(None, [])


def test_a_policy_that_is_to_wait_at_first_waits_more_often(tmp_path):
    def waits(run) -> int:
        return sum(row.get("op") == "WAIT" for row in rows(run / "metrics.jsonl"))

    tiny_run(tmp_path / "even", rounds=1, **{"network.op_bias": {}})
    tiny_run(tmp_path / "patient", rounds=1, **{"network.op_bias": {"WAIT": 3.0}})
    assert waits(tmp_path / "patient") > waits(tmp_path / "even") + 8


def test_the_last_epoch_ends_the_episode_for_the_learner():
    """Nothing follows that counts, so the critic must not be asked what would."""
    config = tiny_config(envs=2, steps=3)
    with GrowthRounds(config, tiny_task(), NullRecorder(), ["cpu"]) as env:
        env.reset(0)
        flags = [env.step(wait(2))[3:] for _ in range(3)]
    assert [terminated.tolist() for terminated, _ in flags] == [
        [False] * 2,
        [False] * 2,
        [True] * 2,
    ]
    assert not any(truncated.any() for _, truncated in flags)


def test_a_policy_can_start_from_another_run(tmp_path):
    first = tiny_run(tmp_path / "first", rounds=1)
    config = tiny_config(warm_start=str(tmp_path / "first"))
    state = new_state(config, first.space, first)
    for name, tensor in first.agent.network.state_dict().items():
        assert torch.equal(tensor, state.agent.network.state_dict()[name])
    assert torch.equal(first.observations.mean, state.observations.mean)
    assert state.agent.update_count == 0
    tiny_run(tmp_path / "second", rounds=1, warm_start=str(tmp_path / "first"))
    other = replace(first.space, num_slots=7)
    with pytest.raises(ValueError, match="the policy to start from is for 2 slots"):
        new_state(config, other, first)


def test_a_round_on_the_real_digits_runs_through(tmp_path):
    from esper.api.training import train_ppo

    config = tiny_config(rounds=1, envs=2, steps=2)
    state = train_ppo(config, tmp_path / "run")
    assert state.round == 1
    assert all(o["task"] == "digits" for o in rows(tmp_path / "run" / "outcomes.jsonl"))
    assert tiny_task().name == "digits"
