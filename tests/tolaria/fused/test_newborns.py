"""Hosts at birth are those that are built, however they are made."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from esper.growth.hosts.cnn import CNNHost
from esper.growth.hosts.mlp import MLPHost
from esper.tolaria.engine.recipe import new_host
from esper.tolaria.fused import newborns as module
from esper.tolaria.fused.newborns import newborns
from esper.tolaria.tasks import find_task

KEYS, CPU = [5, 3, 11, 4], torch.device("cpu")


class Scaled(CNNHost):
    """Draws in its modules, and then does more."""

    def __init__(self) -> None:
        super().__init__(in_channels=1, base_channels=2)
        with torch.no_grad():
            self.head.weight.mul_(2.0)


class Wilful(CNNHost):
    """Draws a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(in_channels=1, base_channels=2)
        self.offset = nn.Parameter(torch.randn(10))


def made(build) -> tuple[int, list]:
    """How many hosts were built for the keys; and their parameters beside those of built ones."""
    task = find_task("digits")
    recipe = replace(task.recipe(task.load(Path("unused"))), build=build)
    built = []

    def count(*arguments):
        built.append(arguments)
        return new_host(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "new_host", count)
        found = [
            (key, [p.clone() for p in host.parameters()])
            for key, host in newborns(recipe, KEYS, new_host(recipe, KEYS[0], CPU))
        ]
    assert [key for key, _ in found] == KEYS
    wanted = [list(new_host(recipe, key, CPU).parameters()) for key in KEYS]
    return len(built), [
        pair
        for (_, got), want in zip(found, wanted, strict=True)
        for pair in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (partial(CNNHost, in_channels=1, base_channels=2), 1),
        (partial(CNNHost, in_channels=1, base_channels=2, kernel_size=1), 1),
        (partial(MLPHost, 64), 1),
        (Scaled, 3),
        (Wilful, 3),
    ],
)
def test_they_have_the_bits_of_hosts_that_are_built(build, count):
    """Those whose modules draw everything are not built again and again."""
    number, pairs = made(build)
    assert number == count
    assert all(torch.equal(got, want) for got, want in pairs)
