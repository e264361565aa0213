"""Shapley's axioms on games that are known, and attribution among real seeds."""

from itertools import permutations

import numpy as np
import pytest

from esper.leyline import BLUEPRINT, IS_BLENDED, OP, SLOT, History, LifecycleOp
from esper.leyline.events import ShapleyComputed
from esper.tamiyo.situation import wait
from esper.tolaria.engine.attribution import (
    CoalitionGame,
    attribute,
    attribute_seeds,
    exact_shapley,
    sampled_shapley,
)
from reward_support import small_env


def table_game(n, key):
    """Any worth for any coalition."""
    worth = np.random.default_rng(key).normal(size=2**n)
    return CoalitionGame(n, lambda members: worth[members @ (1 << np.arange(n))])


def brute_force(game):
    """Shapley's definition: the mean marginal gain over all orders."""
    n, total = game.n_players, np.zeros(game.n_players)
    orders = list(permutations(range(n)))
    for order in orders:
        inside = np.zeros(n, dtype=bool)
        for player in order:
            before = game.values(inside[None])[0]
            inside[player] = True
            total[player] += game.values(inside[None])[0] - before
    return total / len(orders)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_exact_values_are_the_mean_over_all_orders(n):
    game = table_game(n, key=n)
    assert np.allclose(exact_shapley(game), brute_force(game))


@pytest.mark.parametrize("key", range(10))
def test_efficiency(key):
    game = table_game(4, key)
    worth = game.values(np.array([[True] * 4, [False] * 4]))
    assert exact_shapley(game).sum() == pytest.approx(worth[0] - worth[1])
    estimate, _ = sampled_shapley(game, key=key, pairs=5)
    assert estimate.sum() == pytest.approx(worth[0] - worth[1])


def test_symmetry_and_dummy():
    # Players 0 and 1 are interchangeable, player 2 adds nothing to anybody.
    def worth(members):
        pair = members[:, :2].sum(axis=1)
        return pair**2 + 3.0 * members[:, 3] * pair

    game = CoalitionGame(4, worth)
    values = exact_shapley(game)
    assert values[0] == pytest.approx(values[1])
    assert values[2] == pytest.approx(0.0)
    assert values[3] > 0
    estimate, error = sampled_shapley(game, key=1, pairs=8)
    assert estimate[2] == error[2] == 0.0


@pytest.mark.parametrize("key", range(5))
def test_additivity(key):
    one, two = table_game(4, key), table_game(4, key + 100)
    both = CoalitionGame(4, lambda members: one.values(members) + 2.0 * two.values(members))
    assert np.allclose(exact_shapley(both), exact_shapley(one) + 2.0 * exact_shapley(two))


@pytest.mark.parametrize("n", [5, 6, 7])
def test_sampled_values_are_within_three_standard_errors(n):
    game = table_game(n, key=n)
    exact = exact_shapley(game)
    for key in range(5):
        estimate, error = sampled_shapley(game, key=key, pairs=60)
        assert (error > 0).all()
        assert (np.abs(estimate - exact) <= 3.0 * error).all()


def test_standard_errors_tell_how_far_estimates_scatter():
    game = table_game(6, key=3)
    runs = [sampled_shapley(game, key=key, pairs=20) for key in range(200)]
    scatter = np.std([estimate for estimate, _ in runs], axis=0)
    stated = np.mean([error for _, error in runs], axis=0)
    assert np.allclose(stated, scatter, rtol=0.25)


def test_an_order_and_its_reversal_cancel_what_depends_on_place():
    """With pairwise effects only, a single antithetic pair is exact: nothing is left to scatter."""
    effects = np.triu(np.random.default_rng(0).normal(size=(6, 6)))
    game = CoalitionGame(6, lambda m: np.einsum("ki,ij,kj->k", m, effects, m))
    estimate, error = sampled_shapley(game, key=4, pairs=2)
    assert np.allclose(estimate, exact_shapley(game))
    assert np.allclose(error, 0.0)


def test_sampling_depends_on_its_key_only():
    first, again = (sampled_shapley(table_game(6, 0), key=7, pairs=4) for _ in range(2))
    other = sampled_shapley(table_game(6, 0), key=8, pairs=4)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    with pytest.raises(ValueError, match="at least 2"):
        sampled_shapley(table_game(6, 0), key=7, pairs=1)


def test_every_coalition_is_evaluated_once():
    asked = []

    def worth(members):
        asked.extend(map(tuple, members.tolist()))
        return members.sum(axis=1).astype(float)

    game = CoalitionGame(4, worth)
    found = attribute(game)
    assert len(asked) == len(set(asked)) == found.evaluations == 16
    assert np.array_equal(found.leave_one_out, np.ones(4))
    assert np.allclose(found.shapley, 1.0)
    assert found.standard_error is None


def test_above_five_players_values_are_sampled():
    game = CoalitionGame(8, lambda m: m[:, 0] * 5.0 + m[:, 1] * m[:, 2] * m[:, 3])
    found = attribute(game, key=1, pairs=12)
    assert found.evaluations < 2**8
    assert found.standard_error is not None
    assert found.shapley[0] == pytest.approx(5.0)
    assert (np.abs(found.shapley[4:]) <= found.standard_error[4:]).all(), "they do nothing"


# --- real seeds ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown():
    """A host with two seeds that act on its output."""
    env = small_env([3], steps=20)
    situation = env.reset()
    for step in range(6):
        actions = wait(1)
        if step < 2:
            actions[0, OP], actions[0, SLOT] = LifecycleOp.GERMINATE, step
            actions[0, BLUEPRINT] = situation.catalogue.index("branch" if step else "mlp_small")
        situation = env.step(actions).after
    assert IS_BLENDED[env.table.stage[0]].sum() == 2
    return env


def test_leave_one_out_is_the_contribution_in_the_table(grown):
    # The table was filled before the last lifecycle tick moved alphas on: measure again.
    grown.garden.record(grown.garden.evaluate(np.array([True])), np.array([True]))
    found = attribute_seeds(grown, 0)
    assert np.allclose(found.leave_one_out, grown.table.contribution[0, :2])


def test_attribution_of_real_seeds_adds_up(grown):
    event = attribute_seeds(grown, 0)
    both_or_none = np.array([[True] * 3, [False, False, True]])
    scores = grown.population.evaluate(np.array([0, 0]), both_or_none).score
    assert sum(event.shapley) == pytest.approx(scores[0] - scores[1])
    assert event == ShapleyComputed(
        env=0,
        step=6,
        modules=("blocks.0", "blocks.1"),
        slot_ids=("r0c0", "r0c1"),
        leave_one_out=event.leave_one_out,
        shapley=event.shapley,
        standard_error=None,
        evaluations=4,
        macs=event.macs,
    )


def test_what_is_known_is_not_evaluated_again_and_the_rest_is_billed(grown):
    known = grown.garden.evaluate(np.array([True]))
    before = grown.garden.train_macs.copy()
    event = attribute_seeds(grown, 0, known)
    whole = attribute_seeds(grown, 0)
    assert event.shapley == whole.shapley
    samples, host = known.samples, grown.garden.host_macs
    assert event.macs == host * samples, "of both seeds only the network without any was not known"
    assert whole.macs == (4 * host + 2 * grown.table.macs[0].sum()) * samples
    assert (grown.garden.train_macs == before).all(), "nothing was decided by it"


def test_no_seed_no_attribution():
    env = small_env([0], recorder=History())
    env.reset()
    assert attribute_seeds(env, 0) is None


def test_d27_shapley_values_are_real_evaluations_with_a_full_payload(grown):
    asked = []

    def evaluate(members):
        asked.append(len(members))
        return members.sum(axis=1).astype(float)

    found = attribute(CoalitionGame(9, evaluate), key=3, pairs=5)
    # Nine players have 362,880 orders and 512 coalitions.
    assert sum(asked) == found.evaluations < 150
    event = attribute_seeds(grown, 0)
    assert (event.env, event.step, event.slot_ids) == (0, 6, ("r0c0", "r0c1"))
    assert len(event.shapley) == len(event.leave_one_out) == 2
