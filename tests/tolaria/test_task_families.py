"""The families of static networks that tasks come with."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

from esper.growth.grown_module import keyed
from esper.growth.hosts import CNNHost
from esper.leyline import ConfigError
from esper.proof.compute import of_width
from esper.tolaria.tasks import all_tasks


@pytest.mark.parametrize("name", [n for n, task in all_tasks().items() if task.widths])
def test_families_hold_the_host_itself_and_grow_with_width(name: str) -> None:
    task = all_tasks()[name]

    def size(module: object) -> int:
        return sum(p.numel() for p in module.parameters())  # type: ignore[attr-defined]

    sizes = [size(of_width(task, width).build()) for width in task.widths]
    assert sizes == sorted(set(sizes))
    assert size(task.build()) in sizes


@pytest.mark.parametrize("name", [n for n, task in all_tasks().items() if task.shape])
def test_the_shape_of_a_task_is_that_of_its_host(name: str) -> None:
    task = all_tasks()[name]
    assert task.host_of_widths is not None
    hosts = []
    for build in (task.build, partial(task.host_of_widths, task.shape)):
        with keyed(0):
            hosts.append(build().state_dict())
    assert hosts[0].keys() == hosts[1].keys()
    assert all(torch.equal(tensor, hosts[1][name]) for name, tensor in hosts[0].items())


def test_every_width_of_a_shape_is_that_of_its_block() -> None:
    host = cast(CNNHost, cast(Any, all_tasks()["digits"].host_of_widths)((3, 1, 5)))
    convolutions = [module for module in host.modules() if isinstance(module, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [3, 1, 5]
    assert host(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_family_needs_its_widths() -> None:
    digits = all_tasks()["digits"]
    for changes in ({"shape": ()}, {"shape": (), "host_of_widths": None}):
        with pytest.raises(ConfigError, match="both host_of_widths and shape"):
            replace(digits, **changes)
