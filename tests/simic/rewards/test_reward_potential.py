"""Potential-based shaping: what it pays, that it telescopes, and that it changes no policy."""

from itertools import pairwise

import numpy as np
import pytest

from esper.leyline import LifecycleOp, SeedStage
from esper.simic.rewards.config import ContributionRewardConfig, LossRewardConfig
from esper.simic.rewards.modes import compute_reward
from esper.simic.rewards.terms import pbrs, potential
from reward_support import GAMMA, default_config, one_seed, transition


def test_potential_and_its_shaping():
    before, after = (one_seed(SeedStage.TRAINING, n=n) for n in (0, 1))
    assert (potential(before), potential(after)) == (2.0, pytest.approx(2.3))
    assert 0.3 * pbrs(transition(before, after), GAMMA, 0.3, 2.0) == pytest.approx(0.08655)
    for stage in (SeedStage.DORMANT, SeedStage.CULLED, SeedStage.EMBARGOED):
        assert potential(one_seed(stage, n=9)) == 0.0
    assert potential(one_seed(SeedStage.FOSSILIZED, n=99)) == 8.0


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


@pytest.mark.parametrize("mode", ["simplified", "loss"])
@pytest.mark.parametrize("end", [{"truncated": True}, {"terminated": True, "rolled_back": True}])
def test_what_ended_has_no_potential(mode, end):
    config, table = default_config(mode), one_seed(SeedStage.HOLDING)
    paid = compute_reward(transition(table, table, **end), config, GAMMA)["pbrs"]
    assert paid == pytest.approx(-5.5 * config.pbrs_weight)


@pytest.mark.parametrize("gamma", [0.9, 0.995, 1.0])
def test_004_h8_shaping_telescopes_exactly(lifecycles, gamma):
    shaped = ContributionRewardConfig()
    loss = LossRewardConfig(baseline_loss=2.0, target_loss=0.2, typical_loss_delta_std=0.1)
    kinds = [
        (shaped, shaped.pbrs_weight * shaped.shaping_scale, potential),
        (ContributionRewardConfig(mode="simplified"), shaped.pbrs_weight, potential),
        (loss, loss.pbrs_weight, lambda table: potential(table, 0.0, 0.0)),
    ]
    for episode in lifecycles[0]:
        for config, weight, potential_of in kinds:
            shaping = np.array([compute_reward(t, config, gamma)["pbrs"] for t in episode])
            paid = gamma ** np.arange(len(episode)) @ shaping
            first = potential_of(episode[0].before.table)
            assert np.abs(paid + weight * first).max() < 1e-6
            assert np.abs(shaping).max() > 1e-3 * weight


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


def test_shaping_with_another_gamma_changes_the_optimal_policy():
    """Which is why a config that was made for another discount is refused."""
    changed = [
        (solve(p, 0.95, 0.0, 0.95)[0].argmax(axis=1) != solve(p, 0.95, 0.3, 1.0)[0].argmax(axis=1))
        for p in range(20)
    ]
    assert np.any(changed)
