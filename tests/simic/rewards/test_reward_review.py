"""Findings about rewards: one test each, named by review and finding."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from esper.leyline import IS_BLENDED, IS_LIVE, OP, SLOT, ConfigError, LifecycleOp, SeedStage
from esper.simic.rewards import (
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
    RewardComponents,
    compute_reward,
    terms,
)
from esper.simic.rewards.potential import table_potential
from esper.tamiyo import RandomController, wait
from esper.tolaria import run_episode
from reward_support import (
    GAMMA,
    REFERENCE,
    Keeper,
    break_host,
    one_seed,
    small_env,
    transition,
)

SHAPING = [
    ContributionRewardConfig(),
    ContributionRewardConfig(mode="simplified"),
    LossRewardConfig(2.3, 0.3, 0.1),
]


def a(*values):
    return np.array(values, dtype=float)


@pytest.fixture(scope="module")
def episode():
    """A random episode of a real environment; host 1 breaks down on the way."""
    recorder = Keeper()
    env = small_env([21, 22], steps=25, recorder=recorder)
    steps = []

    def keep(t):
        steps.append(t)
        if t.after.step == 12:
            break_host(env, 1)

    run_episode(env, RandomController(), on_step=keep)
    return steps, recorder


@pytest.mark.parametrize("config", SHAPING)
def test_004_c1_a_reward_with_another_gamma_than_the_run_is_refused(config):
    table = one_seed(SeedStage.DORMANT)
    step = transition(table, table)
    compute_reward(step, config, 0.9)
    with pytest.raises(ConfigError, match="leave gamma out of the reward"):
        compute_reward(step, replace(config, gamma=0.995), 0.99)


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


def test_004_h8_shaping_telescopes_exactly(episode):
    steps, _ = episode
    config = ContributionRewardConfig(mode="simplified")
    paid = sum(GAMMA**i * compute_reward(t, config, GAMMA)["pbrs"] for i, t in enumerate(steps))
    first = table_potential(steps[0].before.table)
    assert np.abs(paid + 0.3 * first).max() < 1e-6
    assert table_potential(steps[-1].after.table).max() > 0


@pytest.mark.parametrize(
    ("c", "gained", "severity", "pattern"),
    [(2.0, -0.5, "critical", "ransomware"), (10.0, 1.0, "warning", "disproportion")],
)
@pytest.mark.parametrize("config", [ObjectiveRewardConfig(), *SHAPING])
def test_004_h9_the_dispatcher_reports_reward_hacking(c, gained, severity, pattern, config):
    before = one_seed(SeedStage.BLENDING, slot=1, n_slots=2, n=1)
    after = one_seed(SeedStage.BLENDING, slot=1, n_slots=2, n=2, c=c, gained=gained)
    (event,) = compute_reward(transition(before, after), config, GAMMA).suspicions
    assert (event.severity, event.pattern) == (severity, pattern)
    assert (event.slot_id, event.blueprint, event.env) == ("r0c1", "conv_light", 0)
    assert (event.contribution, event.total_improvement) == (c, gained)
    # Told when it begins, not in every step.
    assert compute_reward(transition(after, after), config, GAMMA).suspicions == ()


def test_004_h9_honest_seeds_are_not_suspected():
    table = one_seed(SeedStage.BLENDING, c=3.0, gained=2.0)
    before = one_seed(SeedStage.BLENDING)
    assert compute_reward(transition(before, table), REFERENCE, GAMMA).suspicions == ()


@pytest.mark.parametrize(("scale", "expected"), [(2.5, 1.95), (1.0, 0.78)])
def test_004_h10_the_scale_of_sparse_rewards_is_effective(scale, expected):
    config = ContributionRewardConfig(mode="sparse", sparse_reward_scale=scale)
    assert terms.sparse_reward(a(80.0), a(100_000), config) == pytest.approx(expected)
    assert terms.sparse_reward(a(-1e9), a(0), config) == -scale
    assert terms.sparse_reward(a(1e9), a(0), config) == scale


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
    bonus = terms.fossilize_shaping(np.full(6, SeedStage.HOLDING), best, best, n, config)
    cost = terms.holding_penalty(np.ones(6, dtype=bool), n, config)
    # Each further epoch from the second on: a larger share of the bonus, but a larger penalty.
    assert (np.diff(bonus)[1:] + cost[2:] < 0).all()


def test_004_h11_no_penalty_for_a_seed_without_credit():
    for c, expected in ((3.0, -0.025), (0.0, 0.0), (-1.0, 0.0), (np.nan, 0.0)):
        before = one_seed(SeedStage.HOLDING, c=c, gained=1.0, n=1)
        after = one_seed(SeedStage.HOLDING, c=c, gained=1.0, n=2)
        step = compute_reward(transition(before, after), ContributionRewardConfig(), GAMMA)
        assert step["holding_penalty"] == pytest.approx(expected)


@pytest.mark.parametrize("total", [0.0, 1e-9, -1e-9, 5e-324])
def test_004_m1_the_share_of_shaping_is_zero_for_a_total_of_nothing(total):
    parts = {"pbrs": a(1.0), "score": a(total - 1.0)}
    found = RewardComponents.of(parts, np.array([True]), frozenset({"pbrs"}))
    assert found.shaped_ratio == 0.0
    parts = {"pbrs": a(1.0), "score": a(3.0)}
    found = RewardComponents.of(parts, np.array([True]), frozenset({"pbrs"}))
    assert found.shaped_ratio == 0.25


def test_004_m2_what_was_not_measured_is_not_credited_by_proxy():
    """What its host has gained meanwhile says nothing about a seed without a counterfactual."""
    before = one_seed(SeedStage.TRAINING, n=1)
    after = one_seed(SeedStage.TRAINING, n=2, gained=20.0)
    step = transition(before, after, before_measured={"score": 50.0}, score=70.0)
    assert compute_reward(step, REFERENCE, GAMMA)["attribution"] == 0.0
    assert not any("proxy" in name for name in ContributionRewardConfig.__dataclass_fields__)


def test_004_m3_the_penalty_for_culling_a_good_seed_is_bounded():
    stage = np.array([SeedStage.HOLDING])
    assert terms.cull_shaping(stage, a(1e300), a(9), REFERENCE) == pytest.approx(-0.9)


def test_004_m4_a_loss_reward_can_be_made_for_any_task():
    config = LossRewardConfig(baseline_loss=10.8, target_loss=3.5, typical_loss_delta_std=0.15)
    table = one_seed(SeedStage.DORMANT)
    step = transition(table, table, before_measured={"loss": 5.0}, loss=4.85, truncated=True)
    found = compute_reward(step, config, GAMMA)
    assert found["loss"] == pytest.approx(5.0)
    assert found["terminal_loss"] == pytest.approx((10.8 - 4.85) / 7.3)
    with pytest.raises(ConfigError, match="target_loss must be below"):
        LossRewardConfig(baseline_loss=1.0, target_loss=2.0, typical_loss_delta_std=0.1)


@pytest.mark.parametrize("op", [LifecycleOp.GERMINATE, LifecycleOp.CULL, LifecycleOp.FOSSILIZE])
def test_004_m5_the_cost_of_an_intervention_has_one_source(op):
    name = f"{op.name.lower()}_cost"
    config = replace(REFERENCE, **{name: 0.7})
    assert config.intervention_costs[op] == 0.7
    table = one_seed(SeedStage.HOLDING, c=2.0, gained=1.0, n=1)
    charged = compute_reward(transition(table, table, op), config, GAMMA)["intervention"]
    assert charged == pytest.approx(-0.7)


def test_004_m18_contribution_is_known_from_the_first_blending_epoch_and_absent_before(episode):
    for t in episode[0]:
        known = ~np.isnan(t.after.table.contribution)
        stage, was = t.after.table.stage, t.before.table.stage
        assert not known[IS_LIVE[stage] & ~IS_BLENDED[stage]].any()
        stayed = IS_BLENDED[stage] & IS_BLENDED[was] & (t.acted & ~t.rolled_back)[:, None]
        assert known[stayed].all()


def test_d1_every_stage_change_is_paid_and_a_cull_pays_the_potential_back():
    config = ContributionRewardConfig(mode="simplified", simplified_intervention_cost=0.0)
    stages = [SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED]
    worth = dict(zip(stages, (2.0, 3.5, 5.5, 6.0), strict=True))
    for one, two in pairwise(stages):
        step = transition(one_seed(one), one_seed(two))
        paid = compute_reward(step, config, GAMMA)["pbrs"]
        assert paid == pytest.approx(0.3 * (GAMMA * worth[two] - worth[one]))
    gone = transition(one_seed(SeedStage.HOLDING), one_seed(SeedStage.DORMANT), LifecycleOp.CULL)
    assert compute_reward(gone, config, GAMMA)["pbrs"] == pytest.approx(-0.3 * 5.5)


def test_d2_a_falling_loss_is_rewarded_and_the_first_epoch_pays_nothing():
    config = LossRewardConfig(2.3, 0.3, 0.1)
    table = one_seed(SeedStage.DORMANT)
    better = transition(table, table, before_measured={"loss": 1.0}, loss=0.8)
    assert compute_reward(better, config, GAMMA)["loss"] > 0
    first = transition(table, table, before_measured={"loss": np.nan}, loss=0.8)
    assert compute_reward(first, config, GAMMA)["loss"] == 0.0


def test_d3_a_rollback_is_a_true_terminal_with_its_penalty(episode):
    steps, _ = episode
    (broken,) = [t for t in steps if t.rolled_back.any()]
    assert broken.terminated.tolist() == [False, True]
    assert not broken.truncated.any()
    for config, penalty in (
        (ObjectiveRewardConfig(), -1.0),
        (ContributionRewardConfig(), -10.0),
        (ContributionRewardConfig(mode="sparse", sparse_reward_scale=2.0), -2.0),
    ):
        assert compute_reward(broken, config, GAMMA)["rollback"].tolist() == [0.0, penalty]
    after = steps[steps.index(broken) + 1 :]
    assert after
    assert all(compute_reward(t, REFERENCE, GAMMA).total[1] == 0.0 for t in after)


def test_d11_on_wait_no_slot_is_looked_at(episode):
    for t in episode[0]:
        waits = t.actions[:, OP] == LifecycleOp.WAIT
        for slot in range(3):
            actions = t.actions.copy()
            actions[waits, SLOT] = slot
            for config in (*SHAPING, ObjectiveRewardConfig()):
                same = compute_reward(replace(t, actions=actions), config, GAMMA)
                assert np.array_equal(same.total, compute_reward(t, config, GAMMA).total)


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


def test_d29_sparse_modes_charge_what_growth_added_not_the_host():
    config = ContributionRewardConfig(mode="sparse")
    bare = one_seed(SeedStage.DORMANT)
    large = transition(bare, bare, truncated=True, score=80.0, host_params=10**9)
    assert compute_reward(large, config, GAMMA).total == pytest.approx(0.8)
