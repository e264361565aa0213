"""What a mask forbids has a reason, what it allows has none."""

import numpy as np
import pytest

from esper.leyline import LifecycleOp, SeedStage
from esper.leyline.growth_settings import Budget
from esper.tamiyo.controllers.simple import RandomController
from esper.tamiyo.situation import NO_CANDIDATE, Situation, why_no_blueprint, why_no_op, why_no_slot
from esper.tolaria.engine.run import play
from helpers import digits_env


@pytest.fixture(scope="module")
def situations() -> list[Situation]:
    """Of lives at random, with few seeds allowed, to the end."""
    seen: list[Situation] = []
    env = digits_env([1, 2, 3], max_steps=14, train=32, max_seeds=2)
    play(env, RandomController(), on_step=lambda transition: seen.append(transition.after))
    return seen


def test_there_is_a_reason_exactly_for_what_is_forbidden(situations: list[Situation]) -> None:
    for s in situations:
        n_slots, n_blueprints = s.slot_config.num_slots, len(s.catalogue)
        for env in range(s.n_envs):
            for op in LifecycleOp:
                assert (why_no_op(s, env, op) is None) == s.masks.op[env, op]
                for slot in range(n_slots):
                    assert (why_no_slot(s, env, op, slot) is None) == s.masks.slot[env, op, slot]
            allowed = np.array(
                [
                    [why_no_blueprint(s, env, slot, b) is None for b in range(n_blueprints)]
                    for slot in range(n_slots)
                ]
            )
            assert np.array_equal(allowed, s.masks.blueprint[env])


def test_reasons_are_true(situations: list[Situation]) -> None:
    told: set[str] = set()
    for s in situations:
        for env, slot in np.ndindex(s.table.shape):
            reason = why_no_slot(s, env, LifecycleOp.GERMINATE, slot)
            if reason is None:
                continue
            told.add(reason)
            stage = SeedStage(s.table.stage[env, slot]).name
            if "the maximum" in reason:
                assert s.table.holds_seed[env].sum() == 2
                assert stage == "DORMANT"
            elif "the episode" in reason:
                assert not s.running[env]
            else:
                assert stage in reason
                assert stage != "DORMANT"
    # The lives were full enough to tell of each kind.
    assert {"the episode is over", "its seed is TRAINING", "it rests (EMBARGOED)"} <= told
    assert any("the maximum" in reason for reason in told)


def test_what_is_too_dear_is_told_from_what_does_not_fit() -> None:
    s = digits_env([1], max_steps=2, train=32, budget=Budget(params=1.1)).reset()
    assert s.facts is not None
    dear = s.facts.seed_params > 0.1 * s.host_params
    told = set()
    for slot, blueprint in np.argwhere(~s.masks.blueprint[0]):
        reason = why_no_blueprint(s, 0, int(slot), int(blueprint))
        fits = s.facts.fits[slot, blueprint]
        assert reason == ("costs more than is left" if fits else NO_CANDIDATE)
        assert not fits or dear[slot, blueprint]
        told.add(reason)
    assert len(told) == 2
