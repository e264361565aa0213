"""The loss family, at the numbers of the reference."""

import math

import numpy as np
import pytest

from esper.leyline import ConfigError, SeedStage
from esper.simic.rewards.config import LossRewardConfig
from esper.simic.rewards.modes import compute_reward, loss_delta_reward, terminal_loss_reward
from reward_support import GAMMA, LOSSES, one_seed, transition

NAN = float("nan")
PLAIN = LossRewardConfig(**LOSSES)
# The reference weighs a loss that rises by half.
LOSS = LossRewardConfig(**LOSSES, regression_penalty_scale=0.5)


def a(*values):
    return np.array(values, dtype=float)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(1.0, 0.9, 5.0), (1.0, 1.1, -2.5), (9.0, 1.0, 25.0), (1.0, 9.0, -12.5), (NAN, 1.0, 0.0)],
)
def test_change_of_loss(before, after, expected):
    assert loss_delta_reward(a(before), a(after), LOSS) == pytest.approx(expected)


def test_a_loss_that_comes_back_earns_nothing_by_default():
    up, down = (loss_delta_reward(a(x), a(y), PLAIN) for x, y in ((1.0, 1.2), (1.2, 1.0)))
    assert up + down == 0.0


@pytest.mark.parametrize(("loss", "expected"), [(2.3, 0), (1.3, 0.5), (0.3, 1), (0.1, 1), (9, 0)])
def test_final_loss(loss, expected):
    assert terminal_loss_reward(a(loss), LOSS) == pytest.approx(expected)


def test_only_an_episode_that_reached_its_length_has_a_final_loss():
    table = one_seed(SeedStage.DORMANT)
    for end, expected in (({}, 0.0), ({"terminated": True}, 0.0), ({"truncated": True}, 0.5)):
        step = transition(table, table, loss=1.3, **end)
        assert compute_reward(step, LOSS, GAMMA)["terminal_loss"] == pytest.approx(expected)


def test_loss_reward_of_a_step():
    before = one_seed(SeedStage.TRAINING, n=3, age=4, params=500)
    after = one_seed(SeedStage.BLENDING, n=0, age=5, params=500)
    step = transition(before, after, before_measured={"loss": 1.0}, loss=0.9)
    found = compute_reward(step, LOSS, GAMMA)
    assert found["loss"] == pytest.approx(5.0)
    assert found["pbrs"] == pytest.approx(0.1 * (GAMMA * 3.5 - 2.0))
    assert found["rent"] == pytest.approx(-0.05 * math.log(1.5))
    for age, charged in ((2, False), (3, True)):
        young = one_seed(SeedStage.TRAINING, n=1, age=age, params=500)
        assert (compute_reward(transition(young, young), LOSS, GAMMA)["rent"] < 0) == charged


def test_004_m4_a_loss_reward_can_be_made_for_any_task():
    config = LossRewardConfig(baseline_loss=10.8, target_loss=3.5, typical_loss_delta_std=0.15)
    table = one_seed(SeedStage.DORMANT)
    step = transition(table, table, before_measured={"loss": 5.0}, loss=4.85, truncated=True)
    found = compute_reward(step, config, GAMMA)
    assert found["loss"] == pytest.approx(5.0)
    assert found["terminal_loss"] == pytest.approx((10.8 - 4.85) / 7.3)
    with pytest.raises(ConfigError, match="target_loss must be below"):
        LossRewardConfig(baseline_loss=1.0, target_loss=2.0, typical_loss_delta_std=0.1)


def test_d2_a_falling_loss_is_rewarded_and_the_first_epoch_pays_nothing():
    table = one_seed(SeedStage.DORMANT)
    better = transition(table, table, before_measured={"loss": 1.0}, loss=0.8)
    assert compute_reward(better, PLAIN, GAMMA)["loss"] > 0
    first = transition(table, table, before_measured={"loss": NAN}, loss=0.8)
    assert compute_reward(first, PLAIN, GAMMA)["loss"] == 0.0
