"""Every number that the reference gives for its rewards."""

import math

import numpy as np
import pytest

from esper.leyline import ConfigError, LifecycleOp, SeedStage
from esper.simic.rewards import (
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
    compute_reward,
    terms,
)
from esper.simic.rewards.loss import loss_delta_reward, terminal_loss_reward
from esper.simic.rewards.potential import pbrs, seed_potential
from reward_support import GAMMA, REFERENCE, one_seed, transition

NAN = float("nan")


def a(*values):
    return np.array(values, dtype=float)


@pytest.mark.parametrize(
    ("steepness", "gained", "expected"),
    [(3, -0.1, 0.426), (3, -0.5, 0.182), (10, -0.1, 0.269), (3, 0.0, 1.0), (3, 7.0, 1.0)],
)
def test_discount_of_attribution(steepness, gained, expected):
    assert terms.attribution_discount(a(gained), steepness) == pytest.approx(expected, abs=5e-4)


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


@pytest.mark.parametrize(
    ("c", "gained", "progress", "expected"),
    [
        (-2.0, 1.0, 1.0, -2.0),  # what hurts is charged in full
        (3.0, 4.0, 4.0, 3.0),  # no more than taking it out costs
        (4.0, 1.0, 1.0, 2.0),  # geometric mean where the network gained less
        (4.0, 1.0, 0.0, 0.0),
        (4.0, 1.0, NAN, 2.0),  # half, where the score at germination is not known
        (0.9, -0.5, 2.0, 0.9 * 0.182),
        (NAN, 5.0, 5.0, 0.0),  # not measured: never credited with what the host learned
    ],
)
def test_credit(c, gained, progress, expected):
    found = terms.credit(a(c), a(gained), a(progress), REFERENCE)
    assert found == pytest.approx(expected, abs=1e-3)


def test_credit_includes_the_ratio_penalty_unweighted():
    config = ContributionRewardConfig(contribution_weight=2.0)
    found = terms.credit(a(10.0), a(1.0), a(1.0), config)
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


def test_potential_and_its_shaping():
    stage = np.array([SeedStage.TRAINING, SeedStage.TRAINING])
    before, after = seed_potential(stage, np.array([0, 1]))
    assert (before, after) == (2.0, pytest.approx(2.3))
    shaping = pbrs(a(before), a(after), np.array([False]), GAMMA)
    assert 0.3 * shaping == pytest.approx(0.08655)
    nobody = np.array([SeedStage.DORMANT, SeedStage.CULLED, SeedStage.EMBARGOED])
    assert not seed_potential(nobody, np.array([9, 9, 9])).any()
    assert seed_potential(np.array([SeedStage.FOSSILIZED]), np.array([99])) == 8.0


def test_rent():
    assert terms.rent(a(500), 1000, 0.5, 8.0) == pytest.approx(-0.2027, abs=5e-5)
    assert terms.rent(a(0), 1000, 0.5, 8.0) == 0.0
    assert terms.rent(a(1e12), 1, 0.5, 8.0) == -8.0


def shaped_step(before, after, op, config=REFERENCE, **more):
    return compute_reward(transition(before, after, op, **more), config, GAMMA)


def test_germination_pays_its_potential_and_its_cost():
    empty, seed = one_seed(SeedStage.DORMANT), one_seed(SeedStage.GERMINATED)
    step = shaped_step(empty, seed, LifecycleOp.GERMINATE)
    assert step["pbrs"] == pytest.approx(0.2985)
    assert step["intervention"] == pytest.approx(-0.02)
    assert step.total == pytest.approx(0.2785)
    assert terms.germinate_shaping(np.array([SeedStage.TRAINING]), REFERENCE) == -0.3


@pytest.mark.parametrize(
    ("stage", "c", "gained", "n", "expected"),
    [
        (SeedStage.HOLDING, 5.0, 2.0, 5, 1.0),
        (SeedStage.HOLDING, 5.0, 2.0, 2, 0.4),
        (SeedStage.HOLDING, 5.0, 2.0, 9, 1.0),
        (SeedStage.HOLDING, 0.9, 2.0, 5, -0.2),
        (SeedStage.HOLDING, NAN, 2.0, 5, -0.2),
        (SeedStage.HOLDING, 0.05, -1.0, 5, -0.7),
        (SeedStage.HOLDING, 2.0, -1.0, 5, -1.0),
        (SeedStage.HOLDING, 2.0, -50.0, 5, -1.8),
        (SeedStage.BLENDING, 5.0, 2.0, 5, -1.0),
        (SeedStage.DORMANT, NAN, NAN, 0, -1.0),
    ],
)
def test_fossilising(stage, c, gained, n, expected):
    found = terms.fossilize_shaping(np.array([stage]), a(c), a(gained), a(n), REFERENCE)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("n", "expected"), [(5, 0.99), (2, 0.39)])
def test_fossilising_with_its_cost(n, expected):
    before = one_seed(SeedStage.HOLDING, c=5.0, gained=2.0, n=n)
    after = one_seed(SeedStage.FOSSILIZED, c=5.0, gained=2.0)
    step = shaped_step(before, after, LifecycleOp.FOSSILIZE)
    assert step["action_shaping"] + step["intervention"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("stage", "c", "age", "expected"),
    [
        (SeedStage.DORMANT, NAN, 0, -0.2),
        (SeedStage.FOSSILIZED, 3.0, 9, -1.0),
        (SeedStage.GERMINATED, NAN, 0, -0.3),
        (SeedStage.BLENDING, -0.6, 9, 0.3),
        (SeedStage.BLENDING, -0.5, 9, 0.1),
        (SeedStage.BLENDING, -0.1, 9, 0.1),
        (SeedStage.BLENDING, 0.0, 9, -0.3),
        (SeedStage.BLENDING, 2.0, 9, -0.4),
        (SeedStage.BLENDING, 1e9, 9, -0.9),
        (SeedStage.TRAINING, NAN, 9, 0.0),
    ],
)
def test_culling(stage, c, age, expected):
    found = terms.cull_shaping(np.array([stage]), a(c), a(age), REFERENCE)
    assert found == pytest.approx(expected)


def test_culling_takes_the_credit_back():
    before = one_seed(SeedStage.HOLDING, c=4.0, gained=1.0, n=1, age=9)
    after = one_seed(SeedStage.DORMANT)
    assert shaped_step(before, after, LifecycleOp.CULL)["attribution"] == pytest.approx(-2.0)
    hurt = one_seed(SeedStage.BLENDING, c=-3.0, gained=1.0, n=1, age=9)
    assert shaped_step(hurt, after, LifecycleOp.CULL)["attribution"] == pytest.approx(3.0)


def test_a_fossil_that_goes_on_contributing_earns_nothing_more():
    before = one_seed(SeedStage.FOSSILIZED, c=5.0, gained=9.0, n=20)
    after = one_seed(SeedStage.FOSSILIZED, c=5.0, gained=9.0, n=21)
    assert shaped_step(before, after, LifecycleOp.WAIT)["attribution"] == 0.0


def test_the_end_pays_score_and_fossils_that_are_missed():
    table = one_seed(SeedStage.FOSSILIZED, c=1.0, gained=-3.0)
    step = shaped_step(table, table, LifecycleOp.WAIT, truncated=True, score=80.0)
    assert step["terminal_score"] == pytest.approx(4.0)
    assert step["terminal_fossils"] == pytest.approx(3.0)
    useless = one_seed(SeedStage.FOSSILIZED, c=0.9, gained=30.0)
    step = shaped_step(useless, useless, LifecycleOp.WAIT, truncated=True, score=80.0)
    assert step["terminal_fossils"] == 0.0
    step = shaped_step(table, table, LifecycleOp.WAIT, score=80.0)
    assert step["terminal_score"] == step["terminal_fossils"] == 0.0


def test_credit_is_a_loan_that_the_end_calls_in():
    table = one_seed(SeedStage.HOLDING, c=4.0, gained=1.0, n=1)
    for end in ({"truncated": True}, {"terminated": True, "rolled_back": True}):
        assert shaped_step(table, table, LifecycleOp.WAIT, **end)["attribution"] == -2.0


def test_rollback_and_automatic_culls_are_charged_in_their_own_step():
    seed, gone = one_seed(SeedStage.HOLDING, c=-1.0, n=4), one_seed(SeedStage.DORMANT)
    step = shaped_step(seed, gone, LifecycleOp.WAIT)
    assert (step["auto_cull"], step["rollback"]) == (-0.2, 0.0)
    step = shaped_step(seed, gone, LifecycleOp.WAIT, rolled_back=True, terminated=True)
    assert (step["auto_cull"], step["rollback"]) == (0.0, -10.0)
    assert shaped_step(seed, gone, LifecycleOp.CULL)["auto_cull"] == 0.0
    # A seed that broke down in the very epoch of its germination.
    assert shaped_step(gone, gone, LifecycleOp.GERMINATE)["auto_cull"] == -0.2
    assert shaped_step(gone, gone, LifecycleOp.WAIT)["auto_cull"] == 0.0


@pytest.mark.parametrize("stage", [SeedStage.BLENDING, SeedStage.HOLDING])
@pytest.mark.parametrize("c", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("gained", [-2.0, -0.5, -0.2])
def test_ransomware_earns_nothing(stage, c, gained):
    before = one_seed(stage, c=0.0, gained=gained, n=1)
    after = one_seed(stage, c=c, gained=gained, n=2)
    assert shaped_step(before, after, LifecycleOp.WAIT).total <= 0.5
    assert terms.attribution_discount(a(gained), 3.0) < 0.5


# --- sparse, minimal, simplified, loss, objective ------------------------------------------------


def test_sparse_reward():
    config = ContributionRewardConfig(mode="sparse", sparse_reward_scale=2.5)
    assert terms.sparse_reward(a(80.0), a(100_000), config) == pytest.approx(1.95)
    assert terms.sparse_reward(a(100.0), a(1e12), config) == -2.5
    table = one_seed(SeedStage.FOSSILIZED, params=100_000)
    last = transition(table, table, truncated=True, score=10.0, best=80.0, host_params=7_000_000)
    # The best score of the episode, and only the parameters that growth added.
    assert compute_reward(last, config, GAMMA).total == pytest.approx(1.95)
    assert compute_reward(transition(table, table), config, GAMMA).total == 0.0


def test_minimal_reward_charges_early_culls():
    config = ContributionRewardConfig(mode="minimal")
    gone = one_seed(SeedStage.DORMANT)
    for age, expected in ((4, -0.1), (5, 0.0)):
        young = one_seed(SeedStage.TRAINING, n=1, age=age)
        step = transition(young, gone, LifecycleOp.CULL)
        assert compute_reward(step, config, GAMMA).total == pytest.approx(expected)
    wait = transition(one_seed(SeedStage.TRAINING, age=1), gone)
    assert compute_reward(wait, config, GAMMA).total == 0.0


def test_simplified_reward():
    config = ContributionRewardConfig(mode="simplified")
    table = one_seed(SeedStage.FOSSILIZED, c=2.0, n=20)
    step = compute_reward(transition(table, table, truncated=True, score=90.0), config, GAMMA)
    assert step["terminal_score"] == pytest.approx(2.7)
    assert step["terminal_fossils"] == 2.0
    assert step["intervention"] == 0.0
    seed, empty = one_seed(SeedStage.GERMINATED), one_seed(SeedStage.DORMANT)
    step = compute_reward(transition(empty, seed, LifecycleOp.GERMINATE), config, GAMMA)
    assert step.total == pytest.approx(0.2985 - 0.01)


LOSS = LossRewardConfig(
    baseline_loss=2.3, target_loss=0.3, typical_loss_delta_std=0.1, regression_penalty_scale=0.5
)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(1.0, 0.9, 5.0), (1.0, 1.1, -2.5), (9.0, 1.0, 25.0), (1.0, 9.0, -12.5), (NAN, 1.0, 0.0)],
)
def test_change_of_loss(before, after, expected):
    assert loss_delta_reward(a(before), a(after), LOSS) == pytest.approx(expected)


def test_a_loss_that_comes_back_earns_nothing_by_default():
    config = LossRewardConfig(baseline_loss=2.3, target_loss=0.3, typical_loss_delta_std=0.1)
    up, down = (loss_delta_reward(a(x), a(y), config) for x, y in ((1.0, 1.2), (1.2, 1.0)))
    assert up + down == 0.0


@pytest.mark.parametrize(("loss", "expected"), [(2.3, 0), (1.3, 0.5), (0.3, 1), (0.1, 1), (9, 0)])
def test_final_loss(loss, expected):
    assert terminal_loss_reward(a(loss), LOSS) == pytest.approx(expected)


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


def test_objective_is_score_minus_costs():
    before = one_seed(SeedStage.DORMANT)
    after = one_seed(SeedStage.GERMINATED, params=500)
    step = transition(
        before,
        after,
        LifecycleOp.GERMINATE,
        before_measured={"score": 50.0},
        score=60.0,
        train_macs=300,
        host_macs=100,
    )
    config = ObjectiveRewardConfig(param_cost=0.02, compute_cost=0.05)
    found = compute_reward(step, config, GAMMA)
    assert found["score"] == pytest.approx(0.1)
    assert found["params"] == pytest.approx(-0.02 * 0.5)
    assert found["compute"] == pytest.approx(-0.05 * 2.0 / 25)
    assert found["rollback"] == 0.0


def test_environments_that_did_not_act_get_nothing():
    from dataclasses import replace

    table = one_seed(SeedStage.HOLDING, c=5.0, gained=1.0, n=3, params=100)
    step = replace(
        transition(table, table, LifecycleOp.CULL, score=float("nan")), acted=np.array([False])
    )
    for config in (ObjectiveRewardConfig(), REFERENCE, LOSS):
        found = compute_reward(step, config, GAMMA)
        assert not found.values.any()
        assert found.suspicions == ()
        assert found.rows(6, step.acted) == []


def test_a_score_that_is_not_finite_is_an_error_that_names_it():
    table = one_seed(SeedStage.DORMANT)
    with pytest.raises(ValueError, match=r"'score' of environment 0 is nan"):
        compute_reward(transition(table, table, score=NAN), ObjectiveRewardConfig(), GAMMA)


def test_rows_carry_every_component_and_the_total():
    table = one_seed(SeedStage.HOLDING, c=5.0, gained=1.0, n=3, params=100)
    step = transition(table, table)
    found = compute_reward(step, ContributionRewardConfig(), GAMMA)
    (row,) = found.rows(6, step.acted)
    parts = [v for k, v in row.items() if k.startswith("reward.") and k != "reward.shaped_ratio"]
    assert sum(parts) == pytest.approx(row["reward"])
    assert (row["env"], row["step"], row["kind"]) == (0, 6, "reward")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ContributionRewardConfig(mode="dense"),
        lambda: ContributionRewardConfig(holding_penalty="quadratic"),
        lambda: ContributionRewardConfig(rent_weight=-1.0),
        lambda: ContributionRewardConfig(pbrs_weight=NAN),
        lambda: ContributionRewardConfig(contribution_weight=1e300),
        lambda: ContributionRewardConfig(cull_hurting_threshold=0.5),
        lambda: ContributionRewardConfig(param_budget=0),
        lambda: ContributionRewardConfig(holding_penalty_base=0.5),
        lambda: ObjectiveRewardConfig(param_cost=-0.1),
        lambda: ObjectiveRewardConfig(compute_cost=math.inf),
        lambda: LossRewardConfig(0.3, 2.3, 0.1),
        lambda: LossRewardConfig(2.3, 0.3, 0.0),
        lambda: LossRewardConfig(2.3, 0.3, 0.1, grace_epochs=-1),
    ],
)
def test_configs_that_cannot_work_are_refused(make):
    with pytest.raises(ConfigError):
        make()
