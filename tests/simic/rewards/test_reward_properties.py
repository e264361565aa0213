"""What holds for any reward: finite, summing up, blind to labels, telescoping."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.growth import SlotTable
from esper.leyline import (
    BLEND,
    BLUEPRINT,
    IS_BLENDED,
    IS_LIVE,
    OP,
    SLOT,
    ConfigError,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.events import SeedCulled, SeedFossilized
from esper.simic.rewards import (
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
    compute_reward,
)
from esper.simic.rewards.loss import stage_potential
from esper.simic.rewards.potential import table_potential
from esper.tamiyo import RandomController
from esper.tolaria import run_episode
from reward_support import GAMMA, Keeper, break_host, permute_slots, small_env, transition

ALL_CONFIGS = [
    ObjectiveRewardConfig(),
    *(ContributionRewardConfig(mode=m) for m in ("shaped", "simplified", "sparse", "minimal")),
    LossRewardConfig(baseline_loss=2.3, target_loss=0.3, typical_loss_delta_std=0.1),
]
STAGES = np.array([stage for stage in SeedStage if stage != SeedStage.UNKNOWN])


def random_table(draw, n_envs=6, n_slots=4):
    """Any state, also ones that no lifecycle reaches; some of it not measured."""
    table = SlotTable.empty(n_envs, n_slots)
    shape = table.shape
    table.stage[:] = draw.choice(STAGES, shape)
    table.blueprint[:] = draw.integers(0, 13, shape)
    table.epochs_in_stage[:] = draw.integers(0, 40, shape)
    table.epochs_total[:] = table.epochs_in_stage + draw.integers(0, 40, shape)
    table.params[:] = draw.integers(0, 10**6, shape)
    for array, low, high in (
        (table.contribution, -100, 100),
        (table.score_at_birth, 0, 100),
        (table.score, 0, 100),
    ):
        array[:] = draw.uniform(low, high, shape)
        array[draw.random(shape) < 0.2] = np.nan
    tiny = draw.random(shape) < 0.3
    gained = draw.choice([0.0, 1e-300, 1e-9, -1e-9, 1e-300], shape)
    table.score_at_birth[tiny] = 0.0
    table.score[tiny] = gained[tiny]
    return table


def random_transition(key):
    draw = np.random.default_rng(key)
    t = transition(
        random_table(draw),
        random_table(draw),
        op=draw.integers(0, 4, 6),
        slot=draw.integers(0, 4, 6),
        truncated=draw.random(6) < 0.3,
        before_measured={"score": draw.uniform(0, 100, 6), "loss": draw.uniform(0, 20, 6)},
        score=draw.uniform(0, 100, 6),
        loss=draw.uniform(0, 20, 6),
        train_macs=int(draw.integers(0, 10**12)),
        host_macs=int(draw.integers(0, 10**9)),
    )
    rolled_back = draw.random(6) < 0.2
    return replace(
        t, rolled_back=rolled_back, terminated=rolled_back, truncated=t.truncated & ~rolled_back
    )


def settings_of(config_type, **fixed):
    """Any config that validates: every number from 0 to large, signed ones from below 0."""
    number = st.one_of(st.sampled_from([0.0, 1e-12, 1.0]), st.floats(0, 100))
    signed = {
        "improvement_safe_threshold": st.sampled_from([0.0, -1.0, 1e-12, 0.1]),
        "cull_hurting_threshold": st.floats(-10, 0),
        "contributing_threshold": st.floats(-10, 10),
        "holding_penalty_base": st.floats(1, 10),
        "param_budget": st.integers(1, 10**6),
        "grace_epochs": st.integers(0, 10),
        "early_cull_epochs": st.integers(0, 10),
        "typical_loss_delta_std": st.floats(1e-6, 10),
        "baseline_loss": st.floats(1, 20),
        "target_loss": st.floats(-5, 0.5),
        "gamma": st.sampled_from([None, GAMMA]),
        "mode": st.sampled_from(["shaped", "simplified", "sparse", "minimal"]),
        "holding_penalty": st.sampled_from(["linear", "exponential"]),
    }
    return st.builds(
        config_type, **{f.name: signed.get(f.name, number) for f in fields(config_type)}
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.one_of(
        settings_of(ObjectiveRewardConfig),
        settings_of(ContributionRewardConfig),
        settings_of(LossRewardConfig),
    ),
    st.integers(0, 10**6),
)
def test_rewards_are_finite_and_their_parts_sum_up(config, key):
    with np.errstate(all="raise", under="ignore"):
        found = compute_reward(random_transition(key), config, GAMMA)
    assert np.isfinite(found.values).all()
    assert np.allclose(found.total, sum(found[name] for name in found.names), atol=1e-6)
    assert np.isfinite(found.shaped_ratio).all()


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=lambda c: getattr(c, "mode", type(c).__name__))
def test_relabelling_slots_changes_no_reward(config):
    for key in range(30):
        t = random_transition(key)
        order = np.random.default_rng(key).permutation(4)
        renamed = compute_reward(permute_slots(t, order), config, GAMMA)
        original = compute_reward(t, config, GAMMA)
        assert np.allclose(renamed.values, original.values, atol=1e-12)
        ids = t.after.slot_config.slot_ids
        named = {(e.env, ids[order[ids.index(e.slot_id)]], e.pattern) for e in original.suspicions}
        assert {(e.env, e.slot_id, e.pattern) for e in renamed.suspicions} == named


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=lambda c: getattr(c, "mode", type(c).__name__))
def test_heads_that_the_op_ignores_change_nothing(config):
    for key in range(30):
        t = random_transition(key)
        draw = np.random.default_rng(key + 1)
        other = t.actions.copy()
        other[:, BLUEPRINT], other[:, BLEND] = draw.integers(0, 13, 6), draw.integers(0, 3, 6)
        waits = other[:, OP] == LifecycleOp.WAIT
        other[waits, SLOT] = draw.integers(0, 4, waits.sum())
        same = compute_reward(replace(t, actions=other), config, GAMMA)
        assert np.array_equal(same.values, compute_reward(t, config, GAMMA).values)


# --- through the real environment ----------------------------------------------------------------


@pytest.fixture(scope="module")
def lifecycles():
    """Random lives of seeds in real networks: ([transitions of an episode], recorder)."""
    episodes, recorder = [], Keeper()
    for episode, on_panic in enumerate(("terminate", "continue", "terminate", "continue")):
        env = small_env(range(10 * episode, 10 * episode + 3), recorder=recorder, on_panic=on_panic)
        steps = []

        def keep(t, steps=steps, env=env):
            steps.append(t)
            if t.after.step == 17:
                break_host(env, 1)

        run_episode(env, RandomController(), on_step=keep)
        episodes.append(steps)
    return episodes, recorder


def test_the_lifecycles_hold_everything_that_can_happen(lifecycles):
    episodes, recorder = lifecycles
    steps = [t for episode in episodes for t in episode]
    edges = {
        (SeedStage(a), SeedStage(b))
        for t in steps
        for a, b in zip(t.before.table.stage.flat, t.after.table.stage.flat, strict=True)
        if a != b
    }
    for edge in (
        (SeedStage.DORMANT, SeedStage.TRAINING),
        (SeedStage.TRAINING, SeedStage.BLENDING),
        (SeedStage.BLENDING, SeedStage.HOLDING),
        (SeedStage.HOLDING, SeedStage.FOSSILIZED),
        (SeedStage.EMBARGOED, SeedStage.RESETTING),
        (SeedStage.RESETTING, SeedStage.DORMANT),
    ):
        assert edge in edges
    reasons = {e.reason for e in recorder.events if isinstance(e, SeedCulled)}
    assert {"controller", "negative_counterfactual"} <= reasons
    assert any(isinstance(e, SeedFossilized) for e in recorder.events)
    assert any(t.terminated.any() for t in steps)
    assert any((t.rolled_back & ~t.terminated).any() for t in steps)
    assert all(episode[-1].truncated.any() for episode in episodes)


@pytest.mark.parametrize("gamma", [0.9, 0.995, 1.0])
def test_shaping_telescopes_through_the_real_environment(lifecycles, gamma):
    shaped = ContributionRewardConfig()
    loss = LossRewardConfig(baseline_loss=2.0, target_loss=0.2, typical_loss_delta_std=0.1)
    kinds = [
        (shaped, shaped.pbrs_weight * shaped.shaping_scale, table_potential),
        (ContributionRewardConfig(mode="simplified"), shaped.pbrs_weight, table_potential),
        (loss, loss.pbrs_weight, stage_potential),
    ]
    for episode in lifecycles[0]:
        for config, weight, potential in kinds:
            hints = np.array([compute_reward(t, config, gamma)["pbrs"] for t in episode])
            paid = gamma ** np.arange(len(episode)) @ hints
            first = potential(episode[0].before.table)
            assert np.abs(paid + weight * first).max() < 1e-6
            assert np.abs(hints).max() > 1e-3 * weight


def test_the_objective_is_the_final_score_minus_the_initial_one_minus_costs(lifecycles):
    config = ObjectiveRewardConfig(rollback_penalty=0.0)
    for episode in lifecycles[0]:
        steps = [compute_reward(t, config, GAMMA) for t in episode]
        first, last = episode[0].before, episode[-1].after
        finished = last.signals.val_score
        alive = episode[-1].acted
        gained = sum(step["score"] for step in steps)
        expected = (finished - first.signals.val_score) / 100
        assert np.allclose(gained[alive], expected[alive], atol=1e-9)
        grown = (last.total_params - first.total_params) / first.host_params
        assert np.allclose(sum(s["params"] for s in steps)[alive], -0.01 * grown[alive])
        assert (sum(step["compute"] for step in steps) <= 0).all()


def test_attribution_is_settled_when_an_episode_ends(lifecycles):
    config = ContributionRewardConfig()
    for episode in lifecycles[0]:
        parts = [compute_reward(t, config, GAMMA)["attribution"] for t in episode]
        ended = sum(t.terminated | t.truncated for t in episode) > 0
        assert ended.all()
        assert np.abs(sum(parts)).max() < 1e-9
        assert np.abs(parts).max() > 0


def test_static_hosts_cost_nothing_but_what_hosts_cost(lifecycles):
    for t in (t for episode in lifecycles[0] for t in episode):
        bare = t.acted & ~t.before.table.holds_seed.any(axis=1) & (t.actions[:, OP] == 0)
        assert (t.train_macs[bare] == t.host_macs[bare]).all()
        assert (t.train_macs >= t.host_macs).all()


def test_contribution_is_measured_from_the_first_epoch_of_blending_on(lifecycles):
    """A live seed that does not act on the output has no contribution, rather than 0."""
    for t in (t for episode in lifecycles[0] for t in episode):
        was, is_, quiet = t.before.table.stage, t.after.table.stage, ~t.rolled_back[:, None]
        known = ~np.isnan(t.after.table.contribution)
        blended = IS_BLENDED[was] & IS_BLENDED[is_] & t.acted[:, None] & quiet
        assert known[blended].all()
        assert not known[IS_LIVE[is_] & ~IS_BLENDED[is_]].any()


# --- shaping and the optimal policy ---------------------------------------------------------------


def solve(n_stages, gamma, weight, shaping_gamma):
    """Value iteration over one slot: grow on, keep, or give up; gives Q [state, action].

    States are stages; only HOLDING can be kept, which pays by how good the seed is. One action is
    a detour that visits high potential and comes back with nothing.
    """
    phi = np.array([0.0, 1.0, 2.0, 3.5, 5.5, 6.0])
    draw = np.random.default_rng(n_stages)
    n_states, n_actions = 6, 3
    target = np.zeros((n_states, n_actions), dtype=int)
    target[:, 0] = np.minimum(np.arange(n_states) + 1, 4)
    target[:, 1] = 0
    target[:, 2] = [0, 1, 2, 3, 5, 5]
    target[5] = 5
    reward = draw.normal(0.0, 0.3, (n_states, n_actions))
    shaped = reward + weight * (shaping_gamma * phi[target] - phi[:, None])
    q = np.zeros((n_states, n_actions))
    for _ in range(6000):
        q = shaped + gamma * q.max(axis=1)[target]
    return q, phi


@pytest.mark.parametrize("problem", range(20))
def test_shaping_with_the_gamma_of_the_run_keeps_the_optimal_policy(problem):
    plain, phi = solve(problem, 0.95, 0.0, 0.95)
    shaped, _ = solve(problem, 0.95, 0.3, 0.95)
    assert (plain.argmax(axis=1) == shaped.argmax(axis=1)).all()
    assert np.allclose(shaped, plain - 0.3 * phi[:, None], atol=1e-8)


def test_shaping_with_another_gamma_changes_the_optimal_policy_and_is_refused():
    changed = [
        (solve(p, 0.95, 0.0, 0.95)[0].argmax(axis=1) != solve(p, 0.95, 0.3, 1.0)[0].argmax(axis=1))
        for p in range(20)
    ]
    assert np.any(changed)
    t = random_transition(0)
    for config in (
        ContributionRewardConfig(gamma=0.99),
        ContributionRewardConfig(mode="simplified", gamma=0.99),
        LossRewardConfig(2.3, 0.3, 0.1, gamma=0.99),
        ObjectiveRewardConfig(gamma=0.99),
    ):
        compute_reward(t, config, 0.99)
        with pytest.raises(ConfigError, match=r"gamma=0\.99 but the run uses gamma=0\.995"):
            compute_reward(t, config, 0.995)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        compute_reward(t, ObjectiveRewardConfig(), 1.5)
