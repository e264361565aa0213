"""Remedies against noise in the training loop: returns on one scale, groups, resume."""

import numpy as np
import pytest
import torch

from esper.leyline import ConfigError, History, constants
from esper.simic import analytic
from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd
from esper.simic.training.loop import run_training
from esper.simic.training.round_log import Clock, RoundLog, ScaledEnv, scale_returns
from esper.simic.training.state import TrainState, new_state, pack, unpack
from training_support import ANALYTIC, REMEDIES, RunHistory, analytic_state, play, tiny_config


def play_groups(config, state: TrainState, spread: float = 1.0, group: int = 2) -> History:
    history, env = RunHistory(), analytic.AnalyticGrowth(config.envs, config.key, group, spread)
    run_training(config, state, env, analytic.HORIZON, RoundLog(history))
    return history


class Rows:
    """As much of a buffer as has rewards: a row per environment, of any length."""

    def __init__(self, rewards: list[list[float]]) -> None:
        self.step_counts = np.array([len(row) for row in rewards])
        self.max_steps = max(self.step_counts) + 1
        # What an earlier round left beyond the end of a row.
        self.rewards = torch.full((len(rewards), self.max_steps), 99.0)
        for row, values in enumerate(rewards):
            self.rewards[row, : len(values)] = torch.tensor(values)


def test_rewards_are_divided_by_the_deviation_of_all_returns_seen():
    rng = np.random.default_rng(0)
    normalizer, seen = RewardNormalizer(), []
    for _ in range(3):
        rewards = [rng.normal(50.0, 20.0, size=n).tolist() for n in rng.integers(1, 9, size=3)]
        buffer = Rows(rewards)
        scale_returns(buffer, normalizer, gamma=0.9)
        for row in rewards:
            for step in range(len(row)):
                seen.append(sum(0.9**k * r for k, r in enumerate(row[step:])))
        for index, row in enumerate(rewards):
            expected = np.array(row) / np.std(seen, ddof=1)
            np.testing.assert_allclose(buffer.rewards[index, : len(row)], expected, rtol=1e-5)


def paid_once(steps: int, pays: list[float], scaled_by_returns: bool) -> np.ndarray:
    """The reward that the agent gets at the end of episodes in which nothing else is paid."""
    if scaled_by_returns:
        buffer = Rows([[0.0] * (steps - 1) + [pay] for pay in pays])
        scale_returns(buffer, RewardNormalizer(), 1.0)
        return buffer.rewards[:, steps - 1].numpy()
    normalizer = RewardNormalizer()
    for _ in range(steps - 1):
        normalizer(torch.zeros(len(pays)))
    return normalizer(torch.tensor(pays)).numpy()


def test_a_reward_paid_once_tells_good_from_better_in_long_episodes():
    pays = [4.0, 5.0, 6.0]
    clipped = paid_once(150, pays, scaled_by_returns=False)
    assert (clipped == constants.NORMALIZER_CLIP).sum() >= 2
    for steps in (15, 150, 600):
        whole = paid_once(steps, pays, scaled_by_returns=True)
        # Their deviation is the root of 2/3, or a little more for a sample.
        assert np.diff(whole) == pytest.approx([1.5**0.5] * 2, rel=0.02)


def test_returns_that_do_not_differ_are_left_alone():
    buffer = Rows([[0.0, 90.00001], [0.0, 90.00002]])
    scale_returns(buffer, RewardNormalizer(), 1.0)
    assert buffer.rewards[:, 1].tolist() == pytest.approx([90.0, 90.0])


def test_without_normalisers_rewards_pass_and_those_of_the_ended_do_not():
    class Ending(analytic.AnalyticGrowth):
        def step(self, actions):
            seen, masks, _, ends, cut = super().step(actions)
            return seen, masks, np.array([100.0, 200.0]), ends | [True, False], cut

    env = ScaledEnv(Ending(2), RunningMeanStd((analytic.OBSERVATION_DIM,)), None, Clock())
    env.reset(0)
    waits = np.zeros((2, 4), dtype=int)
    assert env.step(waits)[2].tolist() == [100.0, 200.0]
    assert env.step(waits)[2].tolist() == [0.0, 200.0]


def test_a_run_with_every_remedy_is_resumed_to_the_bit():
    # Thresholds that do not depend on the number of rounds, which the first half does not know.
    same = REMEDIES | {"anomalies": {"value_phases": ((1.0, 0.1),)}}
    config = tiny_config(task="analytic", rounds=4, **same)
    whole = new_state(config, ANALYTIC)
    history = play_groups(config, whole)
    assert [row["skipped"] for row in history.of("round")] == [None] * 4
    half = new_state(config, ANALYTIC)
    play_groups(tiny_config(task="analytic", rounds=2, **same), half)
    resumed = unpack(*pack(half))
    play_groups(config, resumed)
    (tensors, meta), (others, other_meta) = pack(whole), pack(resumed)
    assert meta == other_meta
    for name, tensor in tensors.items():
        assert tensor.numpy().tobytes() == others[name].numpy().tobytes(), name


@pytest.mark.parametrize("name", REMEDIES)
def test_each_remedy_is_off_unless_asked_for_and_changes_what_is_learnt(name):
    learnt = {}
    for given in ({}, {name: False}, {name: True}):
        config, state = analytic_state(rounds=2, **given)
        play_groups(config, state)
        learnt[given.get(name)] = pack(state)[0]
    for tensor, same in zip(learnt[None].values(), learnt[False].values(), strict=True):
        assert torch.equal(tensor, same)
    op = "network.op_head.0.weight"
    assert not torch.equal(learnt[None][op], learnt[True][op])


def test_a_run_in_which_environments_are_alone_refuses_groups_before_it_plays():
    config, state = analytic_state(**{"ppo.group_baseline": True})
    with pytest.raises(ConfigError, match="at least 2 environments in every group"):
        play(config, state)
    assert state.round == 0
