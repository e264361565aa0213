"""Observations and rewards are scaled in one place, by statistics that take in what is acted on."""

import numpy as np
import pytest
import torch

from esper.simic import analytic
from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd
from esper.simic.training.round_log import Clock, ScaledEnv
from training_support import analytic_state, play


class Scripted:
    """Three environments with known observations and rewards; the first ends after one step."""

    num_envs = 3
    groups = np.arange(3)

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


def scaled_env(rewards: np.ndarray) -> ScaledEnv:
    return ScaledEnv(Scripted(rewards), RunningMeanStd((2,)), RewardNormalizer(), Clock())


def test_rewards_are_scaled_by_those_of_episodes_that_go_on():
    rewards = np.array([[1.0, 100.0, 300.0], [9.0, 500.0, 100.0]])
    env = scaled_env(rewards)
    env.reset(0)
    env.step(np.zeros((3, 4), dtype=int))
    *_, scaled, _, _ = env.step(np.zeros((3, 4), dtype=int))
    expected = torch.tensor([1.0, 100.0, 300.0, 500.0, 100.0]).std().item()
    assert env.rewards.std == pytest.approx(expected)
    assert scaled[1:] == pytest.approx(np.array([500.0, 100.0]) / expected)
    # The first environment ended with its first step: what comes later is not its reward.
    assert (env.rewards.count, scaled[0]) == (5, 0.0)
    assert env.returns.tolist() == [1.0, 600.0, 400.0]


def test_observations_enter_the_statistics_before_they_are_scaled_and_only_if_acted_on():
    env = scaled_env(np.zeros((3, 3)))
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


def test_004_c5_the_loop_learns_after_the_statistics_took_in_the_round():
    config, state = analytic_state(rounds=3)
    update, seen = state.agent.update, []

    def spy(buffer, generator, detailed):
        seen.append((len(buffer), state.observations.count))
        return update(buffer, generator, detailed=detailed)

    state.agent.update = spy
    play(config, state)
    steps, counts = zip(*seen, strict=True)
    assert counts == pytest.approx(np.cumsum(steps), abs=1e-3)
