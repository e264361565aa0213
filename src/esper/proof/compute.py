"""Compute of training in multiply-adds: what it costs, how many epochs a budget pays for, and
random shapes of equal cost."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from esper.growth.blueprints.catalogue import count_params
from esper.leyline import ConfigError, draw_key
from esper.leyline.constants import COOLING_SAMPLES
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.garden import TRAINING_COST
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import GrowthSettings
from esper.tolaria.tasks import Task

# A growing network costs more with each epoch: with few long ones it leaves much of a small budget.
LEAST_DECISIONS = 6


def of_width(task: Task, width: int) -> Task:
    """The task with a host of the same proportions whose first layer has another width."""
    assert task.host_of_widths is not None, f"task {task.name!r} has hosts of one width only"
    shape = tuple(max(1, round(width * each / task.shape[0])) for each in task.shape)
    return replace(task, build=partial(task.host_of_widths, shape))


def host_size(task: Task, data: DataSplits) -> tuple[int, int]:
    """(parameters, multiply-adds per example) of the task's host."""
    template = LoopedPopulation(task.recipe(data), [0]).template
    return count_params(template.host), template.host_macs


def _forward_passes(task: Task, data: DataSplits) -> tuple[int, int]:
    """Cost of a training epoch and of an evaluation, in forward passes."""
    samples = len(data.train_x)
    if task.batches_per_epoch is not None:
        samples = min(samples, task.batches_per_epoch * task.batch)
    return TRAINING_COST * samples, len(data.val_x)


def training_macs(task: Task, data: DataSplits, macs: int, steps: int) -> int:
    """Cost of the whole training of a fixed network of `macs` per example."""
    training, evaluation = _forward_passes(task, data)
    epochs = steps + 1  # the warm-up epoch comes before the first step
    return macs * epochs * (training + evaluation)


def affordable_steps(task: Task, data: DataSplits, macs: int, budget: int) -> int:
    """Most steps whose `training_macs` stay within `budget`; 1 if it is too small for any."""
    training, evaluation = _forward_passes(task, data)
    epochs = budget // macs // (training + evaluation)
    return max(1, epochs - 1)


def _reserved_passes(evaluation: int, trained: bool) -> int:
    """Forward passes that a budget pays for besides epochs: an evaluation in reserve for a rollback
    and one for settling. A network that arrives `trained` is also evaluated before its first
    epoch."""
    return (2 + trained) * evaluation


def first_epoch_macs(task: Task, data: DataSplits, macs: int, *, trained: bool = False) -> int:
    """Smallest budget that pays for one epoch of a network of `macs` per example."""
    training, evaluation = _forward_passes(task, data)
    return macs * (training + evaluation + _reserved_passes(evaluation, trained))


def extra_budget(task: Task, data: DataSplits, steps: int, extra: float) -> int:
    """The share `extra` of what the training of the task's host for `steps` costs. Raises
    ConfigError if that does not pay for one more epoch."""
    _, macs = host_size(task, data)
    cost = training_macs(task, data, macs, steps)
    needed = first_epoch_macs(task, data, macs, trained=True)
    if extra * cost < needed:
        least = math.ceil(1000 * needed / cost) / 1000
        raise ConfigError(
            f"an extra budget of {extra:g} does not pay for one epoch; {least:g} of the host's "
            "training does"
        )
    return int(extra * cost)


def paced(
    task: Task,
    data: DataSplits,
    macs: int,
    budget: int,
    *,
    trained: bool,
    least: int = 1,
    reserved: int = 0,
) -> tuple[Task, int]:
    """The task, and how many of its epochs `budget` pays for with a network of `macs` per example.

    If whole epochs would leave a part of the budget unused, or would be fewer than `least`, all
    epochs have fewer batches, but at least one. `reserved` forward passes are not spent on epochs.
    """
    training, evaluation = _forward_passes(task, data)
    passes = budget // macs - _reserved_passes(evaluation, trained) - reserved
    whole = max(1, passes // (training + evaluation))

    def batches(epochs: int) -> int:
        return (passes // epochs - evaluation) // (TRAINING_COST * task.batch)

    for epochs in range(least, whole, -1):
        if batches(epochs) >= 1:
            return replace(task, batches_per_epoch=batches(epochs)), epochs
    if (whole + 1) * batches(whole + 1) * TRAINING_COST * task.batch <= whole * training:
        return task, whole
    return replace(task, batches_per_epoch=batches(whole + 1)), whole + 1


def fit_to_budget(
    task: Task, rules: GrowthSettings, data: DataSplits, macs: int
) -> tuple[Task, GrowthSettings]:
    """Task and rules with the epochs that the compute budget pays for, at least one, for a
    network of `macs` per example. If it grows, the budget ends its training before the steps do."""
    assert rules.max_train_macs is not None
    trained = rules.trained
    budget = max(rules.max_train_macs, first_epoch_macs(task, data, macs, trained=trained))
    task, epochs = paced(
        task,
        data,
        macs,
        budget,
        trained=trained,
        least=1 if rules.counterfactuals == "none" else LEAST_DECISIONS,
        reserved=min(COOLING_SAMPLES, len(data.train_x)) if rules.cools else 0,
    )
    steps = epochs if trained else max(1, epochs - 1)
    return task, replace(rules, steps=steps, max_train_macs=budget)


Shape = tuple[int, ...]

SPREAD = math.log(3.0)  # log of the largest factor by which a layer differs from its share
TOLERANCE = 0.1  # of the number of parameters, as a share
MOST_DRAWS = 1000


def random_shapes(
    host_of_widths: Callable[[Shape], nn.Module], shape: Shape, params: float, count: int
) -> list[Shape]:
    """`count` different shapes, or fewer if there are no more, of about `params` parameters each.

    Each layer's share of the width is that of `shape` times a random factor of its own. The same
    arguments return the same shapes.
    """

    def size(widths: Shape) -> int:
        with torch.device("meta"):
            return count_params(host_of_widths(widths))

    def scaled(shares: list[float]) -> Shape:
        """Widths in these proportions with the parameters nearest to `params`, by bisection."""
        low, high = 1e-3, 1e3
        for _ in range(30):
            middle = math.sqrt(low * high)
            if size(_widths(shares, middle)) > params:
                high = middle
            else:
                low = middle
        ends = [_widths(shares, low), _widths(shares, high)]
        return min(ends, key=lambda widths: abs(size(widths) - params))

    found: list[Shape] = []
    for number in range(MOST_DRAWS):
        if len(found) == count:
            break
        drawn = scaled([width * _factor(number, layer) for layer, width in enumerate(shape)])
        # The task's own shape, only wider or narrower, is not random.
        even = len({width / own for width, own in zip(drawn, shape, strict=True)}) == 1
        if abs(size(drawn) / params - 1.0) <= TOLERANCE and drawn not in found and not even:
            found.append(drawn)
    return found


def _factor(number: int, layer: int) -> float:
    share = draw_key(number, "shape", layer) % 10_000 / 10_000
    return math.exp(SPREAD * (2.0 * share - 1.0))


def _widths(shares: list[float], scale: float) -> Shape:
    return tuple(max(1, round(scale * share)) for share in shares)
