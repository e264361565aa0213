"""Findings about attribution."""

import pytest
from esper.simic.attribution import CoalitionGame, attribute, attribute_seeds

from esper.leyline import BLUEPRINT, OP, LifecycleOp
from esper.tamiyo import wait
from reward_support import small_env


def six_steps_with(blueprint):
    """A small environment six steps after the seed germinated, and its situation."""
    env = small_env([2], steps=12)
    state = env.reset()
    for step in range(6):
        actions = wait(1)
        if step == 0:
            actions[0, OP] = LifecycleOp.GERMINATE
            actions[0, BLUEPRINT] = state.catalogue.index(blueprint)
        state = env.step(actions).after
    return env, state


def test_d27_shapley_values_are_real_evaluations_with_a_full_payload():
    asked = []

    def evaluate(members):
        asked.append(len(members))
        return members.sum(axis=1).astype(float)

    found = attribute(CoalitionGame(9, evaluate), key=3, pairs=5)
    # Nine players have 362,880 orders and 512 coalitions.
    assert sum(asked) == found.evaluations < 150
    env, _ = six_steps_with("branch")
    _, event = attribute_seeds(env, 0)
    assert (event.env, event.step, event.slot_ids) == (0, 6, ("r0c0",))
    assert event.shapley == pytest.approx(event.leave_one_out)
