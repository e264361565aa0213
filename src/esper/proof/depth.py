"""The arms of the scenario depth: networks with all blocks from the start, with fewer, and those
that grow, at shares of the compute that the training of the complete network costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from esper.growth.stack_search import find_stacks
from esper.leyline import ConfigError
from esper.leyline.depth import Depth
from esper.leyline.growth_settings import TRAINED_SCHEDULE
from esper.proof.arms import Plan, scratch_plan
from esper.proof.compute import host_size, training_macs
from esper.proof.report import ArmResult
from esper.proof.scenarios import Arm, Bench
from esper.proof.statistics import mean_interval
from esper.tamiyo.controllers.depth import depth_named
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.tasks import Task

ALL = "all blocks"


def depth_arms(
    bench: Bench, controllers: Mapping[str, Controller], shares: Sequence[float]
) -> list[Arm]:
    """For each share of the compute: all blocks, fewer, and every controller. The last controller
    is the reference that the others are compared with."""
    task, size = bench.task, stack_size(bench.task, bench.data)
    cost = training_macs(task, bench.data, host_size(task, bench.data)[1], bench.steps)
    reference = list(controllers)[-1]
    fewer = [2**power for power in range(size.bit_length()) if 2**power < size]
    static = {ALL: task} | {
        f"{count} block{'s' * (count > 1)}": replace(task, depth=Depth(start=count))
        for count in fewer
    }
    groups = []
    for share in shares:
        against = f"{reference} at {share:g}"
        groups += [
            bench.candidates(
                f"{name} at {share:g}",
                scratch_plan(own, int(share * cost), "looped"),
                control_of=against,
            )
            for name, own in static.items()
        ]
        groups += [
            bench.candidates(
                f"{name} at {share:g}",
                _growing(bench, name, controller, int(share * cost)),
                versus=f"{ALL} at {shares[-1]:g}" if share < shares[-1] else None,
            )
            for name, controller in controllers.items()
        ]
    return bench.choose(groups)


def _growing(bench: Bench, name: str, controller: Controller, budget: int) -> Plan:
    task = replace(bench.task, depth=depth_named(name))
    rules = replace(
        bench.growth,
        steps=1,
        schedule=TRAINED_SCHEDULE,
        max_train_macs=budget,
        population="looped",
    )
    return Plan(task, controller, rules)


def stack_size(task: Task, data: DataSplits) -> int:
    """The number of blocks of the task's host. Raises ConfigError if it has no single stack."""
    stacks = find_stacks(task.build(), task.recipe(data).data.example())
    if len(stacks) != 1:
        raise ConfigError(
            f"the host of {task.name} has {len(stacks)} stacks of blocks, and the scenario depth "
            "needs one; take a task with a transformer, such as pydocs or linuxdocs"
        )
    return len(stacks[0].blocks)


def saving(
    results: Sequence[ArmResult], reference: str | None, shares: Sequence[float]
) -> str | None:
    """A sentence: how much less compute growing needs for the score that it reaches with the
    smallest share. What all blocks need for that is interpolated between the shares, in logarithms
    of the compute; beyond them the saving is counted as at the nearest share."""
    if reference is None or len(shares) < 2:
        return None
    scores = {(each.arm, each.key): each.test_score for each in results}
    saved, beyond = list[float](), 0
    for key in sorted({each.key for each in results}):
        grown = scores[f"{reference} at {shares[0]:g}", key]
        static = np.maximum.accumulate([scores[f"{ALL} at {share:g}", key] for share in shares])
        needed = math.exp(np.interp(grown, static, np.log(shares)))
        beyond += not static[0] <= grown <= static[-1]
        saved.append(1.0 - shares[0] / needed)
    low, high = mean_interval(saved)
    interval = "" if low is None or high is None else f" ({100 * low:.0f} to {100 * high:.0f})"
    outside = f"; on {beyond} of {len(saved)} keys its score is outside their range" * bool(beyond)
    return (
        f"With {shares[0]:.0%} of the compute {reference} reaches what all blocks from the start "
        f"need more for: it saves {100 * fmean(saved):.0f} %{interval} of their compute{outside}."
    )
