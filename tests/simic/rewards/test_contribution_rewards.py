"""The modes of the contribution family, step by step."""

from dataclasses import replace

import numpy as np
import pytest

from esper.leyline import LifecycleOp, SeedStage
from esper.simic.rewards.config import ContributionRewardConfig, ObjectiveRewardConfig
from esper.simic.rewards.modes import compute_reward
from esper.tamiyo.situation import wait
from reward_support import GAMMA, REFERENCE, one_seed, small_env, transition


def shaped_step(before, after, op, config=REFERENCE, **more):
    return compute_reward(transition(before, after, op, **more), config, GAMMA)


def test_germination_pays_its_potential_and_its_cost():
    empty, seed = one_seed(SeedStage.DORMANT), one_seed(SeedStage.GERMINATED)
    step = shaped_step(empty, seed, LifecycleOp.GERMINATE)
    assert step["pbrs"] == pytest.approx(0.2985)
    assert step["intervention"] == pytest.approx(-0.02)
    assert step.total == pytest.approx(0.2785)


@pytest.mark.parametrize(("n", "expected"), [(5, 0.99), (2, 0.39)])
def test_fossilising_with_its_cost(n, expected):
    before = one_seed(SeedStage.HOLDING, c=5.0, gained=2.0, n=n)
    after = one_seed(SeedStage.FOSSILIZED, c=5.0, gained=2.0)
    step = shaped_step(before, after, LifecycleOp.FOSSILIZE)
    assert step["action_shaping"] + step["intervention"] == pytest.approx(expected)


def test_only_the_seed_that_an_op_is_applied_to_is_judged():
    tables = [one_seed(SeedStage.HOLDING, c=2.0, gained=1.0, n=1, slot=1, n_slots=2)] * 2
    judged = {
        (op, slot): shaped_step(*tables, op, slot=slot)["action_shaping"][0]
        for op in LifecycleOp
        for slot in (0, 1)
    }
    assert judged.pop((LifecycleOp.CULL, 1)) == pytest.approx(-0.4)
    assert judged.pop((LifecycleOp.FOSSILIZE, 1)) == pytest.approx(0.7 / 5)
    assert not judged[LifecycleOp.GERMINATE, 1]
    assert not judged[LifecycleOp.WAIT, 1]


def test_everything_is_scaled_but_score_and_rollback():
    before = one_seed(SeedStage.HOLDING, c=4.0, gained=1.0, n=2, params=500)
    after = one_seed(SeedStage.FOSSILIZED, c=6.0, gained=1.0, params=500)
    steps = [
        ((before, after, LifecycleOp.FOSSILIZE), {"truncated": True}),
        ((before, before, LifecycleOp.WAIT), {"rolled_back": True, "terminated": True}),
        ((before, one_seed(SeedStage.DORMANT), LifecycleOp.WAIT), {}),
        ((one_seed(SeedStage.BLENDING, c=1.0, gained=-1.0, n=1),) * 2 + (LifecycleOp.WAIT,), {}),
    ]
    paid = set()
    for arguments, more in steps:
        full = shaped_step(*arguments, replace(REFERENCE, shaping_scale=1.0), **more)
        small = shaped_step(*arguments, replace(REFERENCE, shaping_scale=0.01), **more)
        for name in full.names:
            scale = 1.0 if name in ("terminal_score", "rollback") else 0.01
            assert small[name] == pytest.approx(scale * full[name])
        paid |= {name for name in full.names if full[name] != 0}
    assert paid == set(full.names)


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


def test_attribution_is_settled_when_an_episode_ends(lifecycles):
    config = ContributionRewardConfig()
    for episode in lifecycles[0]:
        parts = [compute_reward(t, config, GAMMA)["attribution"] for t in episode]
        ended = sum(t.terminated | t.truncated for t in episode) > 0
        assert ended.all()
        assert np.abs(sum(parts)).max() < 1e-9
        assert np.abs(parts).max() > 0


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
    step = shaped_step(before, after, LifecycleOp.WAIT)
    assert step["attribution"] == 0.0
    assert step.total <= 0.5


def test_004_h11_no_penalty_for_a_seed_without_credit():
    for c, expected in ((3.0, -0.025), (0.0, 0.0), (-1.0, 0.0), (np.nan, 0.0)):
        before = one_seed(SeedStage.HOLDING, c=c, gained=1.0, n=1)
        after = one_seed(SeedStage.HOLDING, c=c, gained=1.0, n=2)
        step = compute_reward(transition(before, after), ContributionRewardConfig(), GAMMA)
        assert step["holding_penalty"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("was", "now", "charged"),
    [
        (SeedStage.HOLDING, SeedStage.HOLDING, True),
        (SeedStage.BLENDING, SeedStage.BLENDING, False),
        (SeedStage.FOSSILIZED, SeedStage.FOSSILIZED, False),
        # A rollback brought it back, or took it back to an earlier stage.
        (SeedStage.EMBARGOED, SeedStage.HOLDING, False),
        (SeedStage.HOLDING, SeedStage.BLENDING, False),
    ],
)
def test_only_a_seed_that_was_left_in_holding_is_charged_for_it(was, now, charged):
    before = one_seed(was, c=3.0, gained=1.0, n=1)
    step = shaped_step(before, one_seed(now, c=3.0, gained=1.0, n=2), LifecycleOp.WAIT)
    assert (step["holding_penalty"] < 0) == charged


def test_004_m2_what_was_not_measured_is_not_credited_by_proxy():
    """What its host has gained meanwhile says nothing about a seed without a counterfactual."""
    before = one_seed(SeedStage.TRAINING, n=1)
    after = one_seed(SeedStage.TRAINING, n=2, gained=20.0)
    step = transition(before, after, before_measured={"score": 50.0}, score=70.0)
    assert compute_reward(step, REFERENCE, GAMMA)["attribution"] == 0.0


@pytest.mark.parametrize("op", [LifecycleOp.GERMINATE, LifecycleOp.CULL, LifecycleOp.FOSSILIZE])
def test_004_m5_the_cost_of_an_intervention_has_one_source(op):
    name = f"{op.name.lower()}_cost"
    config = replace(REFERENCE, **{name: 0.7})
    table = one_seed(SeedStage.HOLDING, c=2.0, gained=1.0, n=1)
    charged = compute_reward(transition(table, table, op), config, GAMMA)["intervention"]
    assert charged == pytest.approx(-0.7)


def test_d3_a_rollback_is_a_true_terminal_with_its_penalty(lifecycles):
    for steps in lifecycles[0][::2]:
        over = np.zeros(3, dtype=bool)
        for t in steps:
            assert (t.terminated == t.rolled_back).all()
            assert not (t.truncated & t.rolled_back).any()
            for config, penalty in (
                (ObjectiveRewardConfig(), 1.0),
                (ContributionRewardConfig(), 10.0),
                (ContributionRewardConfig(mode="sparse", sparse_reward_scale=2.0), 2.0),
            ):
                found = compute_reward(t, config, GAMMA)
                assert (found["rollback"] == -penalty * t.rolled_back).all()
                assert not found.values[over].any()
            over |= t.terminated
        assert over[1]
        assert not over.all()


def test_d19_an_automatic_cull_is_charged_in_its_own_step_also_in_the_last():
    held = one_seed(SeedStage.HOLDING, c=-1.0, n=4)
    step = transition(held, one_seed(SeedStage.DORMANT), truncated=True)
    assert compute_reward(step, REFERENCE, GAMMA)["auto_cull"] == pytest.approx(-0.2)
    for mode in ("simplified", "sparse", "minimal"):
        config = ContributionRewardConfig(mode=mode)
        assert "auto_cull" not in compute_reward(step, config, GAMMA).names


def test_d19_automatic_culls_of_the_real_lifecycle_are_found():
    env = small_env([4], steps=20)
    state = env.reset()
    charged = []
    for step in range(16):
        actions = wait(1)
        if step == 0:
            blueprint = state.catalogue.index("mlp_small")
            actions[0] = 0, blueprint, 0, LifecycleOp.GERMINATE
        t = env.step(actions)
        state = t.after
        charged.append(compute_reward(t, REFERENCE, GAMMA)["auto_cull"][0])
    # Nobody decides about the seed, so it is taken away, once.
    assert env.garden.counts["culled"][0] == 1
    assert sorted(charged)[:2] == [-0.2, 0.0]


def test_sparse_reward():
    config = ContributionRewardConfig(mode="sparse", sparse_reward_scale=2.5)
    table = one_seed(SeedStage.FOSSILIZED, params=100_000)
    last = transition(table, table, truncated=True, score=10.0, best=80.0, host_params=7_000_000)
    # The best score of the episode, and only the parameters that growth added.
    assert compute_reward(last, config, GAMMA).total == pytest.approx(1.95)
    assert compute_reward(transition(table, table), config, GAMMA).total == 0.0


def test_d29_sparse_modes_charge_what_growth_added_not_the_host():
    config = ContributionRewardConfig(mode="sparse")
    bare = one_seed(SeedStage.DORMANT)
    large = transition(bare, bare, truncated=True, score=80.0, host_params=10**9)
    assert compute_reward(large, config, GAMMA).total == pytest.approx(0.8)


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
