"""What holds for any reward: finite, summing up, blind to labels; and what real steps hold."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.growth.slot_table import SlotTable
from esper.leyline import (
    BLEND,
    BLUEPRINT,
    IS_BLENDED,
    IS_LIVE,
    OP,
    SLOT,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.events import SeedCulled, SeedFossilized
from esper.simic.rewards.config import (
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
)
from esper.simic.rewards.modes import MODES, compute_reward
from reward_support import GAMMA, default_config, permute_slots, transition

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


def settings_of(config_type):
    """Any config that validates: every number from 0 to large, some from below 0."""
    number = st.one_of(st.sampled_from([0.0, 1e-12, 1.0]), st.floats(0, 100))
    signed = {
        "improvement_safe_threshold": st.sampled_from([0.0, -1.0, 1e-12, 0.1]),
        "contributing_threshold": st.floats(-10, 10),
        "holding_penalty_base": st.floats(1, 10),
        "param_budget": st.integers(1, 10**6),
        "grace_epochs": st.integers(0, 10),
        "early_cull_epochs": st.integers(0, 10),
        "typical_loss_delta_std": st.floats(1e-6, 10),
        "baseline_loss": st.floats(1, 20),
        "target_loss": st.floats(-5, 0.5),
        "gamma": st.sampled_from([None, GAMMA]),
        "mode": st.sampled_from([n for n, mode in MODES.items() if mode.config is config_type]),
        "holding_penalty": st.sampled_from(["linear", "exponential"]),
    }
    return st.builds(
        config_type, **{f.name: signed.get(f.name, number) for f in fields(config_type)}
    )


@settings(max_examples=150, deadline=None)
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


@pytest.mark.parametrize("mode", list(MODES))
def test_relabelling_slots_changes_no_reward(mode):
    config = default_config(mode)
    for key in range(30):
        t = random_transition(key)
        order = np.random.default_rng(key).permutation(4)
        renamed = compute_reward(permute_slots(t, order), config, GAMMA)
        original = compute_reward(t, config, GAMMA)
        assert np.allclose(renamed.values, original.values, atol=1e-12)
        ids = t.after.slot_config.slot_ids
        named = {(e.env, ids[order[ids.index(e.slot_id)]], e.pattern) for e in original.suspicions}
        assert {(e.env, e.slot_id, e.pattern) for e in renamed.suspicions} == named


# --- through the real environment ----------------------------------------------------------------


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


def test_static_hosts_cost_nothing_but_what_hosts_cost(lifecycles):
    for t in (t for episode in lifecycles[0] for t in episode):
        bare = t.acted & ~t.before.table.holds_seed.any(axis=1) & (t.actions[:, OP] == 0)
        assert (t.train_macs[bare] == t.host_macs[bare]).all()
        assert (t.train_macs >= t.host_macs).all()


def test_004_m18_contribution_is_known_from_the_first_blending_epoch_and_absent_before(lifecycles):
    """A live seed that does not act on the output has no contribution, rather than 0."""
    for t in (t for episode in lifecycles[0] for t in episode):
        was, is_, quiet = t.before.table.stage, t.after.table.stage, ~t.rolled_back[:, None]
        known = ~np.isnan(t.after.table.contribution)
        blended = IS_BLENDED[was] & IS_BLENDED[is_] & t.acted[:, None] & quiet
        assert known[blended].all()
        assert not known[IS_LIVE[is_] & ~IS_BLENDED[is_]].any()


@pytest.mark.parametrize("mode", list(MODES))
def test_d11_on_wait_no_slot_is_looked_at(lifecycles, mode):
    """Nor, with any op, what was to be planted or how it was to be blended."""
    config = default_config(mode)
    for key, t in enumerate((*lifecycles[0][0], *map(random_transition, range(30)))):
        draw, (n_envs, n_slots) = np.random.default_rng(key), t.before.table.shape
        other = t.actions.copy()
        other[:, BLUEPRINT] = draw.integers(0, 13, n_envs)
        other[:, BLEND] = draw.integers(0, 3, n_envs)
        waits = other[:, OP] == LifecycleOp.WAIT
        other[waits, SLOT] = draw.integers(0, n_slots, waits.sum())
        same = compute_reward(replace(t, actions=other), config, GAMMA)
        assert np.array_equal(same.values, compute_reward(t, config, GAMMA).values)
