"""Implicit Q-learning: its parts by hand, and a better policy than the one that was recorded."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline import ConfigError, LifecycleOp
from esper.simic.control.normalization import RunningMeanStd
from esper.simic.recordings.imitation import CloningConfig
from esper.simic.recordings.offline import (
    OfflineConfig,
    Steps,
    encode_actions,
    expectile_loss,
    fit_values,
    flatten,
    learn_offline,
)
from recorded import SPACE, learner, play_analytic, random_player, small_network


def new_scale() -> RunningMeanStd:
    return RunningMeanStd((SPACE.observation_dim,))


def test_it_improves_on_random_behaviour() -> None:
    network, scale = small_network(), new_scale()
    recorded = play_analytic(random_player(0), 200, key=0)
    policy = CloningConfig(epochs=10, minibatch=16, learning_rate=4e-3)
    config = OfflineConfig(steps=1000, width=32, policy=policy)
    report = learn_offline(network, scale, recorded, config)
    behaviour = play_analytic(random_player(5), 300, key=9).returns.mean()
    learnt = play_analytic(learner(network, scale), 300, key=9).returns.mean()
    assert report.mean_return == pytest.approx(recorded.returns.mean())
    assert behaviour < -0.5
    # Never doing anything earns 0: what is learnt has to be worth more than to stop acting.
    assert learnt > 0.5
    assert 0.0 < report.effective_share < 1.0


@pytest.mark.parametrize("expectile", [0.5, 0.8, 0.95])
def test_the_loss_is_least_at_the_expectile(expectile: float) -> None:
    """The e-expectile m of a sample solves e E[(x - m)+] = (1 - e) E[(m - x)+]."""
    sample = torch.from_numpy(np.random.default_rng(0).normal(size=2001))
    grid = torch.linspace(-3, 3, 2401, dtype=torch.float64)
    losses = torch.stack([expectile_loss(sample - m, expectile) for m in grid])
    best = grid[losses.argmin()]
    above = (sample - best).clamp(min=0).mean()
    below = (best - sample).clamp(min=0).mean()
    assert float(expectile * above) == pytest.approx(float((1 - expectile) * below), abs=3e-3)


def test_values_of_a_two_step_problem_in_closed_form() -> None:
    """s0 -a-> s1 -a-> end with rewards 1 and 2: V(s1) = 2, V(s0) = 1 + 0.5 * 2."""
    n = 64
    s0, s1 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    steps = Steps(
        observations=torch.stack([s0, s1]).repeat(n, 1),
        actions=torch.ones(2 * n, 1),
        rewards=torch.tensor([1.0, 2.0]).repeat(n),
        following=torch.stack([s1, torch.tensor([9.0, 9.0])]).repeat(n, 1),
        ends=torch.tensor([False, True]).repeat(n),
    )
    config = OfflineConfig(gamma=0.5, steps=600, batch=64, width=16, learning_rate=5e-3)
    values, *_ = fit_values(steps, config, key=0)
    with torch.no_grad():
        found = values.value(torch.stack([s0, s1])).tolist()
    assert found == pytest.approx([2.0, 2.0], abs=0.1)


def test_a_high_expectile_values_the_best_action_and_a_low_one_the_mean() -> None:
    """One state, two actions with rewards 0 and 1, taken equally often."""
    n = 128
    steps = Steps(
        observations=torch.ones(n, 1),
        actions=torch.eye(2).repeat(n // 2, 1),
        rewards=torch.tensor([0.0, 1.0]).repeat(n // 2),
        following=torch.ones(n, 1),
        ends=torch.ones(n, dtype=torch.bool),
    )
    found = []
    for expectile in (0.5, 0.95):
        config = OfflineConfig(
            expectile=expectile, steps=500, batch=64, width=16, learning_rate=5e-3
        )
        values, *_ = fit_values(steps, config, key=0)
        found.append(values.value(torch.ones(1, 1)).item())
    assert found == pytest.approx([0.5, 0.95], abs=0.06)


def test_actions_are_encoded_without_what_does_not_matter() -> None:
    wait, cull = int(LifecycleOp.WAIT), int(LifecycleOp.CULL)
    actions = np.array([[1, 2, 1, wait], [1, 2, 1, cull], [1, 2, 1, int(LifecycleOp.GERMINATE)]])
    encoded = encode_actions(actions, SPACE)
    assert encoded.sum(axis=1).tolist() == [1, 2, 4]
    same = encode_actions(np.array([[0, 0, 0, wait]]), SPACE)
    assert (encoded[0] == same[0]).all()


def test_steps_follow_each_other_and_end_with_their_episode() -> None:
    episodes = play_analytic(random_player(0), 3, key=0)
    episodes = replace(episodes, lengths=np.array([2, 16, 5]))
    steps = flatten(episodes, new_scale())
    assert steps.ends.nonzero().flatten().tolist() == [1, 17, 22]
    assert torch.equal(steps.following[0], steps.observations[1])
    assert torch.equal(steps.following[2], steps.observations[3])


def test_learning_is_a_function_of_its_key() -> None:
    recorded = play_analytic(random_player(0), 6, key=0)
    config = OfflineConfig(steps=20, policy=CloningConfig(epochs=1))
    found = [learn_offline(small_network(), new_scale(), recorded, config, s) for s in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "settings",
    [{"gamma": 1.5}, {"expectile": 0.4}, {"target_rate": 1.5}, {"beta": -1.0}, {"steps": 0}],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        OfflineConfig(**settings)
