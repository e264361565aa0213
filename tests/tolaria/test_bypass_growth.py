"""Bypasses in an environment: masked by budget, on the bill, brought back by the governor."""

import numpy as np
import pytest

from esper.growth.blueprints.catalogue import count_params, default_catalogue
from esper.growth.snapshot import take_snapshot
from esper.leyline import LifecycleOp, SeedStage
from esper.leyline.growth_settings import Budget
from helpers import break_host, digits_env, network_of

CATALOGUE = default_catalogue()
HALF, DOUBLE = (CATALOGUE.index(name) for name in ("widen_half", "widen_double"))
WAIT = np.array([[0, 0, 0, LifecycleOp.WAIT]])


def germinate(slot: int, blueprint: int, blend: int = 0) -> np.ndarray:
    return np.array([[slot, blueprint, blend, LifecycleOp.GERMINATE]])


@pytest.mark.parametrize("kind", ["looped", "fused"])
def test_a_budget_masks_what_it_does_not_pay(kind: str) -> None:
    """Half as wide again costs the first layer 51 parameters with its valve, twice as wide 98."""
    env = digits_env([1], kind=kind, budget=Budget(params=1.0 + 60 / 496))
    limits = env.garden.limits
    assert limits.params[0, [HALF, DOUBLE]].tolist() == [51, 98]
    assert limits.macs[0, [HALF, DOUBLE]].tolist() == [1152, 2304]
    assert limits.affordable[:, HALF].tolist() == [True, False, False]
    assert not limits.affordable[:, DOUBLE].any()


@pytest.mark.parametrize("kind", ["looped", "fused"])
def test_a_host_that_breaks_comes_back_with_its_bypass(kind: str) -> None:
    env = digits_env([1], max_steps=30, kind=kind)
    env.reset()
    env.step(germinate(1, HALF, blend=2))
    while env.garden.table.stage[0, 1] != SeedStage.HOLDING:
        env.step(WAIT)
    assert env.garden.table.params[0, 1] == count_params(network_of(env, 0).slot(1))
    env.step(np.array([[1, 0, 0, LifecycleOp.FOSSILIZE]]))
    before = take_snapshot(network_of(env, 0), None)
    (saved,) = env.population.snapshot(np.array([0]))
    break_host(env, 0)
    env.population.restore(np.array([0]), [saved])
    after = take_snapshot(network_of(env, 0), None)
    assert after.seeds.keys() == before.seeds.keys() == {1}
    for mine, theirs in zip(after.all_tensors(), before.all_tensors(), strict=True):
        assert np.array_equal(mine.numpy(), theirs.numpy())
