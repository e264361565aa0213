"""Widths that are read off what was grown."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from esper.growth import default_catalogue
from esper.proof.arms import host_size, static_plan
from esper.proof.shapes import found_shape, of_shape, shape_within
from esper.tolaria import Budget, Topology, all_tasks, find_task, make_env
from helpers import small_digits

HALF, DOUBLE, BRANCH, LIGHT = (
    default_catalogue().index(name)
    for name in ("widen_half", "widen_double", "branch", "conv_light")
)
SHAPED = [name for name, task in all_tasks().items() if task.shape]


def seeds(*pairs: tuple[int, int]) -> Topology:
    return pairs


@pytest.mark.parametrize("name", SHAPED)
def test_a_widened_layer_is_as_wide_as_the_layer_and_its_seed(name: str) -> None:
    task = find_task(name)
    for slot, blueprint in product(range(len(task.slots)), (HALF, DOUBLE)):
        widths, rest = found_shape(task, ((slot, blueprint),), default_catalogue())
        assert rest == ()
        assert [i for i, own in enumerate(task.shape) if widths[i] != own] == [slot]
        assert widths[slot] == task.shape[slot] * (3 if blueprint == HALF else 4) // 2
        layers = [m for m in of_shape(task, widths).build().modules() if isinstance(m, nn.Conv2d)]
        assert tuple(layer.out_channels for layer in layers) == widths


@pytest.mark.parametrize("slot", range(3))
@pytest.mark.parametrize("blueprint", [HALF, DOUBLE])
def test_one_widened_layer_costs_the_same_as_a_seed_and_as_a_width(
    slot: int, blueprint: int
) -> None:
    task, data = small_digits()
    topology = seeds((slot, blueprint))
    widths, _ = found_shape(task, topology, default_catalogue())
    assert host_size(of_shape(task, widths), data) == host_size(task, data, topology)


def test_a_single_channel_is_widened_by_one() -> None:
    task = of_shape(find_task("digits"), (1, 3, 8))
    topology = seeds((0, HALF), (1, HALF))
    assert found_shape(task, topology, default_catalogue()) == ((2, 4, 8), ())


def test_what_is_no_widening_stays_a_seed() -> None:
    task = find_task("digits")
    topology = seeds((0, DOUBLE), (1, BRANCH), (2, LIGHT))
    assert found_shape(task, topology, default_catalogue()) == ((4, 4, 8), topology[1:])
    assert found_shape(task, (), default_catalogue()) == (task.shape, ())


def test_without_a_family_of_shapes_everything_stays_a_seed() -> None:
    topology = seeds((0, DOUBLE))
    assert found_shape(find_task("pydocs"), topology, default_catalogue()) == ((), topology)


def test_the_size_with_seeds_is_that_of_the_network_that_has_them() -> None:
    task, data = small_digits()
    topology = seeds((0, DOUBLE), (1, BRANCH), (2, LIGHT))
    plan = static_plan(task, 1, topology)
    env = make_env(task.recipe(data), [0], plan.rules)
    env.reset(topology)
    garden: Any = env.garden
    measured = int(garden.total_params()[0]), int(garden.total_macs()[0])
    assert host_size(task, data, topology) == measured
    assert sum(p.numel() for p in env.population.network(0).parameters()) == measured[0]


@pytest.mark.parametrize(
    ("params", "macs", "read_off"),
    [(1338, None, True), (1337, None, False), (None, None, True), (2.0, 1.5, False)],
)
def test_a_shape_above_the_cap_is_not_read_off(
    params: float | None, macs: float | None, read_off: bool
) -> None:
    """All three layers widened: 1,158 parameters as seeds, 1,338 as widths."""
    task, data = small_digits()
    topology = seeds((0, DOUBLE), (1, HALF), (2, DOUBLE))
    assert host_size(task, data, topology)[0] == 1158
    assert host_size(of_shape(task, (4, 6, 16)), data)[0] == 1338
    found = shape_within(task, data, topology, Budget(params, macs))
    assert found == (((4, 6, 16), ()) if read_off else (task.shape, topology))


def test_a_task_without_shapes_keeps_its_seeds_under_any_cap() -> None:
    task = find_task("pydocs")
    data = task.load(Path("unused"))
    assert shape_within(task, data, ((0, DOUBLE),), Budget(1.01)) == ((), ((0, DOUBLE),))
