"""Shapes of a family of hosts: what growth has found, and random ones, which is what one gets
without knowing where width is needed."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from esper.growth import WIDENINGS, BlueprintCatalogue, count_params, newcomers
from esper.leyline import draw_key
from esper.proof.arms import host_size
from esper.tolaria import Budget, DataSplits, Task, Topology

Shape = tuple[int, ...]

SPREAD = math.log(3.0)  # a layer is up to so much (as a ratio) wider or narrower than its share
CLOSE = 0.1  # a shape may have so many parameters more or less than it should, as a share
MOST_DRAWS = 1000
BLOCK = "blocks."  # and a number: the block of a host whose width is that of its shape


def found_shape(
    task: Task, topology: Topology, catalogue: BlueprintCatalogue
) -> tuple[Shape, Topology]:
    """What was grown as widths of the task's host, and what of it has to stay a seed.

    A layer that a seed has widened is as wide in the shape. Of a task without a family of shapes
    all seeds stay.
    """
    widths, seeds = list(task.shape), []
    for slot, blueprint in topology:
        share = WIDENINGS.get(catalogue[blueprint].name)
        if share is None or not widths or not task.slots[slot].startswith(BLOCK):
            seeds.append((slot, blueprint))
            continue
        block = int(task.slots[slot].removeprefix(BLOCK))
        widths[block] += newcomers(share, task.shape[block])
    return tuple(widths), tuple(seeds)


def shape_within(
    task: Task, data: DataSplits, topology: Topology, budget: Budget
) -> tuple[Shape, Topology]:
    """The same with the catalogue of the task's recipe, for a network that must keep to `budget`.

    Where two layers in a row were widened, newcomers of the one are joined to those of the other in
    the shape, which they are not among seeds. If that is too much, all stay seeds.
    """
    widths, seeds = found_shape(task, topology, task.recipe(data).catalogue)
    if widths == task.shape or keeps_to(budget, of_shape(task, widths), task, data, seeds):
        return widths, seeds
    return task.shape, topology


def keeps_to(
    budget: Budget, other: Task, task: Task, data: DataSplits, seeds: Topology = ()
) -> bool:
    """Does another host, with seeds from birth, keep to a budget for the host of `task`?"""
    host, size = host_size(task, data), host_size(other, data, seeds)
    room = budget.room(*host)
    return all(
        most is None or its - own <= most for its, own, most in zip(size, host, room, strict=True)
    )


def of_shape(task: Task, widths: Shape) -> Task:
    """The task with a host of other widths."""
    assert task.host_of_widths is not None, f"task {task.name!r} has no family of shapes"
    return replace(task, build=partial(task.host_of_widths, widths), shape=widths)


def random_shapes(
    host_of_widths: Callable[[Shape], nn.Module], shape: Shape, params: float, count: int
) -> list[Shape]:
    """`count` different shapes, or fewer if there are no more, of about `params` parameters each.

    Each layer's share of the width is that of `shape` times a random factor of its own. The same
    arguments give the same shapes.
    """
    found: list[Shape] = []
    for number in range(MOST_DRAWS):
        if len(found) == count:
            break
        shares = [width * _factor(number, layer) for layer, width in enumerate(shape)]
        drawn = _scaled(host_of_widths, shares, params)
        size = _size(host_of_widths, drawn)
        if abs(size / params - 1.0) <= CLOSE and drawn not in found and not _even(drawn, shape):
            found.append(drawn)
    return found


def _factor(number: int, layer: int) -> float:
    share = draw_key(number, "shape", layer) % 10_000 / 10_000
    return math.exp(SPREAD * (2.0 * share - 1.0))


def _even(drawn: Shape, shape: Shape) -> bool:
    """Is it the host's own shape, wider or narrower?"""
    return len({width / own for width, own in zip(drawn, shape, strict=True)}) == 1


def _scaled(
    host_of_widths: Callable[[Shape], nn.Module], shares: list[float], params: float
) -> Shape:
    """Widths in these proportions with the parameters nearest to `params`, by bisection."""
    low, high = 1e-3, 1e3
    for _ in range(30):
        middle = math.sqrt(low * high)
        if _size(host_of_widths, _widths(shares, middle)) > params:
            high = middle
        else:
            low = middle
    ends = [_widths(shares, low), _widths(shares, high)]
    return min(ends, key=lambda widths: abs(_size(host_of_widths, widths) - params))


def _widths(shares: list[float], scale: float) -> Shape:
    return tuple(max(1, round(scale * share)) for share in shares)


def _size(host_of_widths: Callable[[Shape], nn.Module], widths: Shape) -> int:
    with torch.device("meta"):
        return count_params(host_of_widths(widths))
