"""Every candidate of a host, side by side."""

from dataclasses import replace

import numpy as np
import pytest

from esper.leyline import BLUEPRINT, OP, SLOT, LifecycleOp
from esper.tamiyo.controllers import make_controller
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import GrowthEnv
from helpers import episode_settings
from training_support import tiny_task


def first_and_second(envs: int, name: str = "each", key: int = 3) -> tuple[GrowthEnv, list]:
    task = tiny_task()
    env = GrowthEnv(
        LoopedPopulation(task.recipe(task.load(None)), [key] * envs), episode_settings(3)
    )
    controller, taken = make_controller(name), []
    situation = env.reset()
    for _ in range(2):
        taken.append(controller.act(situation))
        situation = env.step(taken[-1]).after
    return env, taken


def test_all_that_may_be_planted_is_planted_once_and_once_nothing() -> None:
    env, _ = first_and_second(1)
    legal = np.argwhere(env.garden.limits.fits)
    _, (first, second) = first_and_second(len(legal) + 1)
    planted = first[first[:, OP] == LifecycleOp.GERMINATE][:, [SLOT, BLUEPRINT]]
    assert sorted(map(tuple, planted.tolist())) == sorted(map(tuple, legal.tolist()))
    assert (second[:, OP] == LifecycleOp.WAIT).all()


@pytest.mark.parametrize("name", ["each", "random"])
def test_environments_with_one_key_do_different_things(name: str) -> None:
    _, (first, _) = first_and_second(8, name)
    assert len(np.unique(first, axis=0)) > 3


def test_a_seed_that_may_be_kept_is_kept() -> None:
    env, _ = first_and_second(3)
    assert env.situation is not None
    masks = env.situation.masks
    op, slot = masks.op.copy(), masks.slot.copy()
    op[1, LifecycleOp.FOSSILIZE] = slot[1, LifecycleOp.FOSSILIZE, 1] = True
    ripe = replace(env.situation, masks=replace(masks, op=op, slot=slot))
    actions = make_controller("each").act(ripe)
    assert actions[:, OP].tolist() == [LifecycleOp.WAIT, LifecycleOp.FOSSILIZE, LifecycleOp.WAIT]
    assert actions[1, SLOT] == 1
