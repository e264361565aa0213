"""Families of hosts: what their members are, and that splits share nothing."""

from dataclasses import replace

import pytest
import torch

from esper.growth.blueprints.catalogue import count_params
from esper.leyline import ConfigError
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.recipe import new_network
from esper.tolaria.engine.run import make_env
from esper.tolaria.families import BUILT_IN, find_family
from esper.tolaria.families.digits import CLAIM_D
from esper.tolaria.fused.choice import why_not_fused

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def data():
    return find_family("digits:mixed").task.load(data_root())


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_shape_and_no_key_is_in_two_splits(name):
    family = find_family(name)
    shapes = [{m.widths for m in family.members(split)} for split in SPLITS]
    keys = [{key for m in family.members(split) for key in m.keys} for split in SPLITS]
    for parts in (shapes, keys):
        assert sum(map(len, parts)) == len(set.union(*parts))
    for split in SPLITS:
        members = family.members(split)
        assert len(members) == family.sizes[split]
        assert {family.split_of(m.widths) for m in members} == {split}
        assert len({replace(m, number=0, keys=()) for m in members}) == len(members)
        assert [m.number for m in members] == list(range(len(members)))


@pytest.mark.parametrize("name", ["digits:mixed", "digits:trained"])
def test_what_claim_d_was_tried_on_is_only_for_tests(name):
    family = find_family(name)
    known = set(CLAIM_D)
    assert len(known) == 32
    assert {family.split_of(shape) for shape in known} == {"test"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_members_keep_to_the_ranges_of_their_family(name):
    family = find_family(name)
    for member in family.members("validation"):
        assert family.blocks[0] <= len(member.widths) <= family.blocks[1]
        for block, width in enumerate(member.widths):
            narrow = block == member.bottleneck
            least, most = family.narrow[block] if narrow else family.widths[block]
            assert least <= width <= most
        host = member.task.build()
        assert family.params[0] <= count_params(host) <= family.params[1]
        assert member.kernel in family.kernels
        assert host.blocks[0][0].kernel_size == (member.kernel,) * 2
        assert (member.extra is None) == (member.start == "fresh")
        assert host.slot_modules == member.task.slots


def test_every_trait_of_a_mixed_family_varies():
    members = find_family("digits:mixed").members("train")
    for trait in ("kernel", "rate", "share", "start", "extra"):
        assert len({getattr(m, trait) for m in members}) > 1, trait
    assert {len(m.widths) for m in members} == {2, 3, 4}


def test_the_narrow_block_is_anywhere_and_narrower_than_the_others():
    members = find_family("digits:bottleneck").members("train")
    assert {m.bottleneck for m in members} == {0, 1, 2}
    for m in members:
        assert m.widths[m.bottleneck] < min(w for b, w in enumerate(m.widths) if b != m.bottleneck)


def test_the_same_key_gives_the_same_host(data):
    family = find_family("digits:mixed")
    for key in range(20):
        member, host_key = family.episode("train", key)
        assert (member, host_key) == family.episode("train", key)
        assert host_key in member.keys
    assert len({family.episode("train", key) for key in range(20)}) > 10
    recipe = member.recipe(data)
    one, two = (new_network(recipe, host_key, torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_share_of_the_data_is_spread_over_the_whole_of_training_only(data):
    member = next(m for m in find_family("digits:mixed").members("train") if m.share == 0.5)
    own = member.data(data)
    assert len(own.train_x) == len(own.train_y) == round(0.5 * len(data.train_x))
    assert torch.equal(own.train_x, data.train_x[::2])
    assert torch.equal(own.train_y, data.train_y[::2])
    assert own.val_x is data.val_x
    assert own.test_x is data.test_x


def test_members_can_be_trained_side_by_side_and_plant_only_what_their_family_has(data):
    for name in BUILT_IN:
        member = find_family(name).members("test")[0]
        recipe = member.recipe(data)
        network = new_network(recipe, member.keys[0], torch.device("cpu"))
        assert why_not_fused(recipe, network) is None
        assert len(network.sites) == len(member.widths)
        if member.family.blueprints is not None:
            assert recipe.catalogue.names == member.family.blueprints


def test_no_budget_pays_for_more_steps_than_are_counted_on(data):
    """Against the environment's own account of a host that does nothing."""
    family = find_family("digits:mixed")
    for member in [m for m in family.members("validation") if m.start == "trained"][:3]:
        network = new_network(member.recipe(data), 0, torch.device("cpu"))
        samples, val = round(member.share * len(data.train_x)), len(data.val_x)
        epoch = network.host_macs * (3 * samples + val)
        cost = (member.task.steps + 1) * epoch + 2 * network.host_macs * val
        weights = {0: network.host.state_dict()}
        recipe = replace(member.recipe(data), weights=weights)
        env = make_env(recipe, [0], member.rules(data, cost))
        env.reset()
        paid = int(env.compute_budget.epochs(env.best)[0])
        assert paid <= member.steps(data) <= paid + 3
        assert member.steps(data) <= family.most_steps(data)


def test_a_family_or_split_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match=r"digits:mixt.*digits:mixed"):
        find_family("digits:mixt")
    with pytest.raises(ConfigError, match="no split 'dev'"):
        find_family("digits:mixed").members("dev")
