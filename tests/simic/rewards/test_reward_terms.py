"""The terms of the contribution family, at every number that the reference gives for them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from esper.leyline import SeedStage
from esper.simic.rewards import terms
from esper.simic.rewards.config import ContributionRewardConfig
from esper.simic.rewards.modes import compute_reward
from reward_support import GAMMA, REFERENCE, one_seed, transition

NAN = float("nan")


def a(*values):
    return np.array(values, dtype=float)


@pytest.mark.parametrize(
    ("c", "gained", "expected"),
    [
        (10.0, 1.0, -0.1),
        (20.0, 1.0, -0.3),
        (80.0, 1.0, -0.3),
        (5.0, 1.0, 0.0),
        (5.0, 0.05, -0.15),
        (10.0, 0.0, -0.3),
        (40.0, 0.0, -0.3),
        (1.0, 0.01, 0.0),
        (5.0, -0.1, 0.0),
        (5.0, NAN, 0.0),
    ],
)
def test_ratio_penalty(c, gained, expected):
    assert terms.ratio_penalty(a(c), a(gained), REFERENCE) == pytest.approx(expected)


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1e-12])
@pytest.mark.parametrize("gained", [0.0, 1e-300, 1e-9])
def test_004_c2_tiny_improvements_are_never_divided_by(threshold, gained):
    config = replace(REFERENCE, improvement_safe_threshold=threshold)
    table = one_seed(SeedStage.HOLDING, c=5.0, n=1)
    table.score_at_birth[0, 0], table.score[0, 0] = 0.0, gained
    with np.errstate(all="raise", under="ignore"):
        found = compute_reward(transition(one_seed(SeedStage.DORMANT), table), config, GAMMA)
    assert np.isfinite(found.values).all()
    # The branch for improvements too small to divide by: by the size of the contribution.
    assert terms.ratio_penalty(a(5.0), a(gained), config) == pytest.approx(-0.15)


@pytest.mark.parametrize(
    ("c", "gained", "expected"),
    [
        (-2.0, 1.0, -2.0),  # what hurts is charged in full
        (-2.0, -1.0, -2.0),
        (3.0, 4.0, 3.0),  # no more than taking it out costs
        (4.0, 1.0, 2.0),  # geometric mean where the network gained less
        (0.9, 0.0, 0.0),
        (0.9, 1e-300, 0.0),
        (4.0, -0.5, 0.0),  # nothing where it got worse
        (4.0, NAN, 2.0),  # half, where the score at germination is not known
        (NAN, 5.0, 0.0),  # not measured: never credited with what the host learned
    ],
)
def test_credit(c, gained, expected):
    assert terms.credit(a(c), a(gained), REFERENCE) == pytest.approx(expected, abs=1e-3)


def test_credit_includes_the_ratio_penalty_unweighted():
    config = ContributionRewardConfig(contribution_weight=2.0)
    found = terms.credit(a(10.0), a(1.0), config)
    assert found == pytest.approx(2.0 * math.sqrt(10.0) - 0.1)


@pytest.mark.parametrize(
    ("epochs", "gained", "expected"),
    [(1, -0.1, -0.15), (3, -0.1, -0.25), (6, -0.1, -0.40), (50, -9.0, -0.40), (3, 0.0, 0.0)],
)
def test_blending_warning(epochs, gained, expected):
    stage = np.array([SeedStage.BLENDING])
    assert terms.blending_warning(stage, a(gained), a(epochs), 0.1) == pytest.approx(expected)
    other = np.array([SeedStage.HOLDING])
    assert terms.blending_warning(other, a(gained), a(epochs), 0.1) == 0.0


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("exponential", [0, 0, -1, -3, -9, -10, -10]), ("linear", [0, 0, -2.5, -5, -7.5, -10, -10])],
)
def test_holding_penalty(shape, expected):
    config = ContributionRewardConfig(holding_penalty=shape)
    n = np.arange(7)
    assert terms.holding_penalty(np.ones(7, dtype=bool), n, config).tolist() == expected
    assert not terms.holding_penalty(np.zeros(7, dtype=bool), n, config).any()


def test_holding_penalty_is_finite_after_a_thousand_epochs():
    assert terms.holding_penalty(np.array([True]), np.array([1000]), REFERENCE) == -10.0


@pytest.mark.parametrize("shape", ["linear", "exponential"])
def test_004_h11_the_holding_penalty_is_bounded_monotone_and_a_setting(shape):
    config = ContributionRewardConfig(holding_penalty=shape, holding_penalty_cap=4.0)
    n = np.arange(40)
    found = terms.holding_penalty(np.ones(40, dtype=bool), n, config)
    assert (np.diff(found) <= 0).all()
    assert found[:2].tolist() == [0.0, 0.0]
    assert found.min() == -4.0


def test_004_h11_waiting_costs_more_than_the_bonus_it_earns():
    config = ContributionRewardConfig()
    n, best = np.arange(6), np.full(6, 100.0)
    bonus = terms.fossilize_shaping(best, best, n, config)
    cost = terms.holding_penalty(np.ones(6, dtype=bool), n, config)
    # Each further epoch from the second on: a larger share of the bonus, but a larger penalty.
    assert (np.diff(bonus)[1:] + cost[2:] < 0).all()


def test_rent():
    assert terms.rent(a(500), 1000, 0.5, 8.0) == pytest.approx(-0.2027, abs=5e-5)
    assert terms.rent(a(0), 1000, 0.5, 8.0) == 0.0
    assert terms.rent(a(1e12), 1, 0.5, 8.0) == -8.0


@pytest.mark.parametrize(
    ("c", "gained", "n", "expected"),
    [
        (5.0, 2.0, 5, 1.0),
        (5.0, 2.0, 2, 0.4),
        (5.0, 2.0, 9, 1.0),
        (0.9, 2.0, 5, -0.2),
        (1.0, 0.0, 5, 0.6),
        (0.1, -1.0, 5, -0.7),
        (2.0, -0.2, 5, -0.54),
        (2.0, -1.0, 5, -1.0),
        (2.0, -50.0, 5, -1.8),
    ],
)
def test_fossilising(c, gained, n, expected):
    found = terms.fossilize_shaping(a(c), a(gained), a(n), REFERENCE)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("c", "expected"),
    [(-0.6, 0.0), (-0.1, 0.0), (0.0, -0.3), (2.0, -0.4), (1e9, -0.9), (NAN, 0.0)],
)
def test_culling(c, expected):
    assert terms.cull_shaping(a(c), REFERENCE) == pytest.approx(expected)


def test_004_m3_the_penalty_for_culling_a_good_seed_is_bounded():
    assert terms.cull_shaping(a(1e300), REFERENCE) == pytest.approx(-0.9)


@pytest.mark.parametrize(("scale", "expected"), [(2.5, 1.95), (1.0, 0.78)])
def test_004_h10_the_scale_of_sparse_rewards_is_effective(scale, expected):
    config = ContributionRewardConfig(mode="sparse", sparse_reward_scale=scale)
    assert terms.sparse_reward(a(80.0), a(100_000), config) == pytest.approx(expected)
    assert terms.sparse_reward(a(-1e9), a(0), config) == -scale
    assert terms.sparse_reward(a(1e9), a(0), config) == scale
