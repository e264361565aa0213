"""One loop for every environment: it learns, and the same key gives the same run."""

from dataclasses import replace

import pytest
import torch

from esper.api.training import resume_ppo
from esper.leyline import ConfigError
from esper.simic import analytic
from esper.simic.agent.rollout import play_round
from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd
from esper.simic.training.config import DEFAULT_PPO, NetworkSettings, TrainingConfig
from esper.simic.training.loop import Hooks, run_training
from esper.simic.training.round_log import Clock, RoundLog, ScaledEnv
from esper.simic.training.state import TrainState, new_state
from training_support import (
    ANALYTIC,
    analytic_state,
    play,
    rows,
    same_run,
    tiny_config,
    tiny_run,
    tiny_task,
)


def analytic_config(key: int) -> TrainingConfig:
    return TrainingConfig(
        task="analytic",
        rounds=160,
        envs=32,
        key=key,
        network=NetworkSettings(feature_dim=32, lstm_hidden_dim=32),
        ppo=replace(
            DEFAULT_PPO,
            learning_rate=4e-3,
            gamma=0.99,
            gae_lambda=0.95,
            entropy_coef=0.2,
            entropy_coef_end=0.02,
            entropy_anneal_updates=30,
        ),
    )


def score_of(state: TrainState, envs: int = 512) -> float:
    """Mean return of the most probable actions in episodes that were not trained on."""
    scaled = ScaledEnv(
        analytic.AnalyticGrowth(envs, key=10_000),
        _frozen(state.observations),
        RewardNormalizer(),
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

    def score(number: int, row: dict, timing: dict) -> None:
        if number % 10 == 9:
            scores.append(score_of(state))

    state = new_state(config, ANALYTIC)
    run_training(
        config,
        state,
        analytic.AnalyticGrowth(config.envs, key),
        analytic.HORIZON,
        RoundLog(),
        hooks=Hooks(on_round=score, stop=lambda: bool(scores) and scores[-1] >= 0.95 * optimum),
    )
    assert scores[-1] >= 0.95 * optimum


def test_the_same_key_gives_the_same_bytes_and_another_does_not(tmp_path):
    for name, key in (("a", 1), ("b", 1), ("c", 2)):
        tiny_run(tmp_path / name, rounds=1, key=key)
    same_run(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError):
        same_run(tmp_path / "a", tmp_path / "c")


def test_the_number_of_threads_before_a_run_does_not_matter_and_is_put_back(tmp_path):
    try:
        torch.set_num_threads(2)
        tiny_run(tmp_path / "a", rounds=1, **{"network.lstm_hidden_dim": 128})
        tiny_run(tmp_path / "b", rounds=1, **{"network.lstm_hidden_dim": 128})
        assert torch.get_num_threads() == 2
        with pytest.raises(ConfigError):
            resume_ppo(tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    same_run(tmp_path / "a", tmp_path / "b")


def test_a_policy_that_is_to_wait_at_first_waits_more_often(tmp_path):
    def waits(run) -> int:
        return sum(row.get("op") == "WAIT" for row in rows(run / "metrics.jsonl"))

    tiny_run(tmp_path / "even", rounds=1, **{"network.op_bias": {}})
    tiny_run(tmp_path / "patient", rounds=1, **{"network.op_bias": {"WAIT": 3.0}})
    assert waits(tmp_path / "patient") > waits(tmp_path / "even") + 8


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


def test_every_round_is_shuffled_anew_and_the_same_in_every_run():
    shuffles = []
    for _ in range(2):
        config, state = analytic_state(rounds=3)
        update, orders = state.agent.update, []

        def spy(buffer, generator, detailed, update=update, orders=orders):
            orders.append(torch.randperm(16, generator=generator.clone_state()).tolist())
            return update(buffer, generator, detailed=detailed)

        state.agent.update = spy
        play(config, state)
        shuffles.append(orders)
    assert shuffles[0] == shuffles[1]
    assert len({tuple(order) for order in shuffles[0]}) == 3
