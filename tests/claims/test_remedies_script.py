"""benchmarks/remedies.py: the arms differ by their remedies, learn from recorded hosts, and are
measured on hosts of other shapes."""

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

import remedies
from esper.leyline import OP, ConfigError, draw_key
from recorded_hosts import HOSTS, SPACE, recorded
from replayed import Replayed, Table

GIVEN = Namespace(family="digits:trained", rounds=30, envs=64, group=8)


def test_arms_differ_from_none_by_their_settings_only():
    plain = remedies.config_of(GIVEN, "plain", 1).flat()
    changed = {}
    for arm in remedies.ARMS:
        flat = remedies.config_of(GIVEN, arm, 1).flat()
        changed[arm] = {name for name, value in flat.items() if value != plain[name]}
    alone = [changed[arm] for arm in remedies.REMEDIES]
    assert changed["plain"] == set()
    assert all(len(each) == 1 for each in alone)
    assert set().union(*alone) == changed["both"]
    assert len(changed["both"]) == 2


def test_what_is_replayed_pays_what_it_paid_then():
    episodes = recorded()
    table = Table.of(episodes)
    assert len(table) == HOSTS
    for row in (0, 4, 77, 111):
        where = (table.seen == episodes.observations[row, 0]).all(axis=1)
        host = table.rows(np.flatnonzero(where))
        assert host.returns(episodes.actions[row]) == episodes.returns[row]
        assert host.masks.allows(episodes.actions[row]).all()


def test_shapes_that_are_learnt_from_are_not_measured_on():
    table, held_out = Table.of(recorded()).split()
    assert len(table) + len(held_out) == HOSTS
    assert len(held_out) > 3
    assert not set(table.shapes) & set(held_out.shapes)


def test_a_group_has_one_host_and_rounds_have_others():
    env = Replayed(Table.of(recorded()), envs=8, group=4, key=1)
    first, _ = env.reset(0)
    assert len(np.unique(first[:4], axis=0)) == len(np.unique(first[4:], axis=0)) == 1
    again, _ = env.reset(0)
    other, _ = env.reset(1)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert draw_key(1, "replayed", 0, 0) != draw_key(1, "replayed", 0, 1)


def test_a_policy_learns_where_to_plant_on_shapes_that_it_has_not_seen():
    table, held_out = Table.of(recorded()).split()
    config = replace(remedies.config_of(GIVEN, "both", 0), rounds=40)
    found = remedies.train(config, SPACE, table, held_out)
    bounds = remedies.without_learning(table, held_out)
    assert bounds["best"] == pytest.approx(bounds["waiting"] + 0.02)
    assert found["objective"] > max(bounds["fixed"], bounds["random"], bounds["waiting"]) + 0.005


def test_a_host_that_was_never_left_alone_is_refused():
    episodes = recorded()
    planted = episodes.rows(np.flatnonzero(episodes.actions[:, 0, OP] > 0))
    with pytest.raises(ConfigError, match="never left alone"):
        Table.of(replace(planted))
