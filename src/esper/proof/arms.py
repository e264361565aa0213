"""One arm: train networks under a controller and keep what they reached and cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from esper.growth.blueprints.catalogue import count_params
from esper.leyline import ConfigError, Recorder
from esper.leyline.growth_settings import GrowthSettings, Topology
from esper.tamiyo.controllers.static import StaticController
from esper.tamiyo.situation import Controller, Situation
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.garden import TRAINING_COST
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import SETTLING_EVALUATIONS, Trained, host_settings, make_env
from esper.tolaria.engine.run import train as train_networks
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks.base import Task

DO_NOTHING = StaticController()


@dataclass(frozen=True)
class Plan:
    """How a network is trained. `task` holds the host and the learning rate that are used. Plans
    are equal if their networks can be trained side by side. `weights` are those of hosts that
    arrive trained, by key, one mapping for all plans that differ in nothing else."""

    task: Task
    controller: Controller
    rules: GrowthSettings
    weights: Mapping[int, Mapping[str, Tensor]] | None = field(default=None, compare=False)


def train(
    plan: Plan,
    data: DataSplits,
    keys: Sequence[int],
    recorder: Recorder | None = None,
    *,
    attribute: bool = False,
) -> list[Trained]:
    """Follow the plan on the training and validation parts of `data`, for all keys side by side.

    Ctrl-C raises KeyboardInterrupt: half an episode is no result.
    """
    trained = train_networks(
        replace(plan.task.recipe(data), weights=plan.weights),
        keys,
        plan.rules,
        plan.controller,
        task=plan.task.name,
        recorder=recorder,
        attribute=attribute,
    )
    if any(each.outcome.ended == "interrupted" for each in trained):
        raise KeyboardInterrupt
    return trained


def first_situation(task: Task, data: DataSplits) -> Situation:
    """What every controller of an evaluation gets to see first, for some key."""
    return make_env(
        task.recipe(data), [0], GrowthSettings(task.steps, schedule=task.schedule)
    ).reset()


# --- networks that do not grow -------------------------------------------------------------------


def of_width(task: Task, width: int) -> Task:
    """The task with a host of another width."""
    assert task.host_of_width is not None, f"task {task.name!r} has no family of hosts"
    return replace(task, build=partial(task.host_of_width, width))


def static_plan(
    task: Task, steps: int, topology: Topology = (), population: PopulationKind = "looped"
) -> Plan:
    """A fixed network pays for no counterfactuals: nobody has to decide anything about it."""
    rules = GrowthSettings(
        steps,
        topology=topology,
        counterfactuals=False,
        population=population,
        schedule=task.schedule,
    )
    return Plan(task, DO_NOTHING, rules)


def host_plan(task: Task, steps: int, population: PopulationKind = "looped") -> Plan:
    """A host trained to its end: what there is to rescue."""
    return Plan(task, DO_NOTHING, host_settings(steps, task.schedule, population))


def host_size(task: Task, data: DataSplits) -> tuple[int, int]:
    """(parameters, multiply-adds per example) of the task's host."""
    template = LoopedPopulation(task.recipe(data), [0]).template
    return count_params(template.host), template.host_macs


def _pass_cost(task: Task, data: DataSplits) -> tuple[int, int]:
    """Forward passes that an epoch of training, and an evaluation, are worth."""
    samples = len(data.train_x)
    if task.batches_per_epoch is not None:
        samples = min(samples, task.batches_per_epoch * task.batch)
    return TRAINING_COST * samples, len(data.val_x)


def training_macs(task: Task, data: DataSplits, macs: int, steps: int) -> int:
    """Multiply-adds of the whole training of a fixed network of `macs` per example."""
    training, evaluation = _pass_cost(task, data)
    epochs = steps + 1  # the warm-up epoch comes before the first step
    return macs * (epochs * (training + evaluation) + SETTLING_EVALUATIONS * evaluation)


def affordable_steps(task: Task, data: DataSplits, macs: int, budget: int) -> int:
    """Most steps whose `training_macs` stay within `budget`; 1 if it is too small for any."""
    training, evaluation = _pass_cost(task, data)
    epochs = (budget // macs - SETTLING_EVALUATIONS * evaluation) // (training + evaluation)
    return max(1, epochs - 1)


def first_epoch_macs(task: Task, data: DataSplits, macs: int, *, trained: bool = False) -> int:
    """Least budget with which a network of `macs` per example is trained at all: an epoch and all
    that is evaluated."""
    training, evaluation = _pass_cost(task, data)
    return macs * (training + evaluation + _beside_epochs(evaluation, trained))


def extra_budget(task: Task, data: DataSplits, macs: int, cost: int, extra: float) -> int:
    """What may be spent on a trained host of `macs` per example whose training cost `cost`; raises
    ConfigError if that does not pay for an epoch."""
    needed = first_epoch_macs(task, data, macs, trained=True)
    if extra * cost < needed:
        least = math.ceil(1000 * needed / cost) / 1000
        raise ConfigError(
            f"an extra budget of {extra:g} does not pay for one epoch; {least:g} of the host's "
            "training does"
        )
    return int(extra * cost)


def _beside_epochs(evaluation: int, trained: bool) -> int:
    """Forward passes that a budget must pay for beside epochs: those of settling, and one that is
    kept back for a rollback. A network that arrives `trained` is evaluated before its first."""
    return (1 + SETTLING_EVALUATIONS + trained) * evaluation


def paced(
    task: Task,
    data: DataSplits,
    macs: int,
    budget: int,
    *,
    trained: bool,
    least: int = 1,
    beside: int = 0,
) -> tuple[Task, int]:
    """The task, and how many epochs of it a network of `macs` per example gets for `budget`.

    If a last epoch could not be paid for, all are a few batches shorter than they would be: an arm
    that left a part of its budget would be compared with less than it may have. They are also
    shorter if that is needed to have `least` of them, or as many as that leaves a batch each.
    `beside` are forward passes that the budget pays for too.
    """
    training, evaluation = _pass_cost(task, data)
    passes = budget // macs - _beside_epochs(evaluation, trained) - beside
    whole = max(1, passes // (training + evaluation))

    def batches(epochs: int) -> int:
        return (passes // epochs - evaluation) // (TRAINING_COST * task.batch)

    for epochs in range(least, whole, -1):
        if batches(epochs) >= 1:
            return replace(task, batches_per_epoch=batches(epochs)), epochs
    if (whole + 1) * batches(whole + 1) * TRAINING_COST * task.batch <= whole * training:
        return task, whole
    return replace(task, batches_per_epoch=batches(whole + 1)), whole + 1
