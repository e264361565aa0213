"""Hosts of a family that are trained once and kept."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch

from esper.leyline import ConfigError
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.controllers.simple import StaticController
from esper.tolaria.engine.run import play_run
from esper.tolaria.families import find_family
from esper.tolaria.families import hosts as hosts_module
from esper.tolaria.families.hosts import FOLDER, hosts_of
from training_support import load_few

FAMILY = find_family("digits:trained")
SMALL = replace(
    FAMILY,
    name="digits:small",
    task=replace(FAMILY.task, steps=6, batch=16, load=partial(load_few)),
    extras=(0.9,),
    hosts=2,
    sizes={"train": 2, "validation": 1, "test": 1},
)


@pytest.fixture(scope="module")
def data():
    return load_few(None)


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    member = SMALL.members("train")[0]
    return member, root, hosts_of(member, data, root)


def same(one, two) -> bool:
    weights = [
        torch.equal(one.weights[key][name], two.weights[key][name])
        for key in one.weights
        for name in one.weights[key]
    ]
    return one.cost == two.cost and all(weights) and one.weights.keys() == two.weights.keys()


def test_what_is_kept_is_what_was_made(made, data, tmp_path, monkeypatch):
    member, root, hosts = made
    assert same(hosts, hosts_of(member, data, tmp_path)), "training them is no function of the key"
    monkeypatch.setattr(hosts_module, "_train", None)
    assert same(hosts, hosts_of(member, data, root))


def test_a_damaged_file_is_made_again_with_a_line_in_the_log(made, data, caplog):
    member, root, hosts = made
    (file,) = (root / FOLDER).glob("*/*/tensors.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-8] + b"\1" * 8)
    with caplog.at_level(logging.WARNING):
        assert same(hosts, hosts_of(member, data, root))
    assert str(file) in caplog.text
    assert file.read_bytes() == content


def test_the_cost_is_what_training_one_of_them_takes(made, data):
    member, _, hosts = made
    alone = play_run(
        member.recipe(data),
        [member.keys[0]],
        GrowthSettings(member.task.steps, counterfactuals="none", keep_best=False),
        StaticController(),
        task="digits",
        attribute=False,
    )
    assert hosts.cost == alone[0].outcome.train_macs


def test_nothing_is_made_for_hosts_that_start_fresh(data, tmp_path):
    fresh = replace(SMALL.members("train")[1], start="fresh", extra=None)
    hosts = hosts_of(fresh, data, tmp_path)
    assert hosts.weights is None
    assert hosts.cost is None
    assert not list(tmp_path.iterdir())


def test_everything_that_matters_is_in_the_name(made, data):
    member, _, _ = made
    other = replace(data, val_y=data.val_y.flip(0))
    names = [
        hosts_module._digest(each, given, precision)
        for each, given, precision in (
            (member, data, "fp32"),
            (member, data, "bf16"),
            (member, other, "fp32"),
            (replace(member, kernel=5), data, "fp32"),
            (replace(member, rate=2.0), data, "fp32"),
            (replace(member, share=0.5), data, "fp32"),
            (replace(member, keys=(1, 2)), data, "fp32"),
        )
    ]
    assert len(set(names)) == len(names)
    for same_hosts in (replace(member, number=9), replace(member, extra=0.5)):
        assert hosts_module._digest(same_hosts, data, "fp32") == names[0]


def test_a_folder_that_cannot_be_written_is_named(data, tmp_path):
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(ConfigError, match="set ESPER_DATA"):
        hosts_of(SMALL.members("train")[0], data, tmp_path)
