"""The objective: what an episode gained, minus what it cost."""

import numpy as np
import pytest

from esper.leyline import LifecycleOp, SeedStage
from esper.simic.rewards.config import ObjectiveRewardConfig
from esper.simic.rewards.modes import compute_reward
from reward_support import GAMMA, one_seed, transition


def test_objective_is_score_minus_costs():
    step = transition(
        one_seed(SeedStage.DORMANT),
        one_seed(SeedStage.GERMINATED, params=500),
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
