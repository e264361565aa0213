"""Kept seeds can be removed by audits, and come back if the network misses them."""

import numpy as np
import pytest

from esper.growth.lifecycle import cull, one_slot, removable, remove_kept
from esper.leyline import (
    OP,
    SLOT,
    History,
    InvalidStateMachineError,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.events import RemovalUndone, SeedCulled
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.controllers.heuristic import HeuristicController
from esper.tamiyo.situation import wait
from esper.tolaria.engine.run import GrowthEnv
from helpers import digits_env

KEPT = ((0, 2),)


def with_kept_seed(history: History | None = None, **settings) -> GrowthEnv:
    """One small host that begins with a kept seed in its first slot, at its first audit."""
    env = digits_env([3], max_steps=9, recorder=history, topology=KEPT, **settings)
    env.reset()
    while env.step_count < 2:
        env.step(wait(1))
    return env


def removal() -> np.ndarray:
    actions = wait(1)
    actions[0, [OP, SLOT]] = LifecycleOp.CULL, 0
    return actions


def legal(env: GrowthEnv) -> bool:
    return bool(env.situation.masks.slot[0, LifecycleOp.CULL, 0])


def test_a_kept_seed_may_be_removed_only_by_an_audit_after_its_grace_period() -> None:
    env, found = digits_env([3], max_steps=9, topology=KEPT, audit_every=3), []
    env.reset()
    for _ in range(6):
        found.append(legal(env))
        env.step(wait(1))
    assert found == [False, False, True, False, False, True]
    assert not legal(with_kept_seed())
    with pytest.raises(InvalidStateMachineError, match="not legal"):
        with_kept_seed().step(removal())


def test_no_other_way_leads_out_of_being_kept() -> None:
    env = with_kept_seed(audit_every=3)
    where = one_slot(env.table, 0, 0)
    assert removable(env.table, env.settings)[0, 0]
    with pytest.raises(InvalidStateMachineError, match="FOSSILIZED to CULLED"):
        cull(env.table, where, "controller")
    with pytest.raises(InvalidStateMachineError, match="FOSSILIZED to CULLED"):
        remove_kept(env.table, where, GrowthSettings(9, audit_every=2))
    remove_kept(env.table, where, env.settings)
    assert env.table.stage[0, 0] == SeedStage.CULLED


@pytest.mark.parametrize("missed", [True, False])
def test_a_removal_that_costs_score_is_undone(missed: bool) -> None:
    history = History()
    env = with_kept_seed(history, audit_every=3)
    before = {name: value.copy() for name, value in vars(env.table).items()}
    params = env.garden.total_params()[0]
    env.score[:] = 100.0 + env.tracker.noise if missed else 0.0
    env.step(removal())
    undone = [event for event in history.events if isinstance(event, RemovalUndone)]
    assert [e.reason for e in history.events if isinstance(e, SeedCulled)] == ["audit"]
    assert len(undone) == missed
    if missed:
        assert env.table.stage[0, 0] == SeedStage.FOSSILIZED
        assert env.table.params[0, 0] == before["params"][0, 0]
        assert env.garden.total_params()[0] == params
        assert not np.isnan(env.table.contribution[0, 0])
        assert undone[0].score_without < undone[0].score_before
        # Another grace period begins.
        assert [legal(env), env.step(wait(1)) and legal(env)] == [False, False]
        env.step(wait(1))
        env.step(wait(1))
        assert legal(env)
    else:
        assert env.table.stage[0, 0] in (SeedStage.CULLED, SeedStage.EMBARGOED)
        assert env.garden.total_params()[0] < params
    assert env.garden.counts["culled"][0] == (not missed)


def test_the_heuristic_removes_a_kept_seed_without_which_the_network_is_better() -> None:
    env = with_kept_seed(audit_every=3)
    controller = HeuristicController()
    controller.reset(1)
    for worth, op in ((-1.0, LifecycleOp.CULL), (1.0, LifecycleOp.WAIT), (np.nan, 0)):
        env.situation.table.contribution[0, 0] = worth
        actions = controller.act(env.situation)
        assert (actions[0, OP], actions[0, SLOT]) == (op, 0)
