"""One arm on one key: train a network under a controller and keep what it reached and cost."""

import time
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from esper.growth import LifecycleRules, count_params, default_catalogue
from esper.leyline import EpisodeOutcome, Recorder
from esper.tamiyo import Controller, Situation, StaticController
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.environment import GrowthEnv
from esper.tolaria.episode import run_episode, settle_outcome
from esper.tolaria.garden import TRAINING_COST
from esper.tolaria.population import LoopedPopulation
from esper.tolaria.tasks import Task

Topology = tuple[tuple[int, int], ...]

# A run ends with two evaluations: of the network at its best, and of what is kept of it.
SETTLING_EVALUATIONS = 2


@dataclass(frozen=True)
class Plan:
    """How one network is trained. `task` holds the host and the learning rate that are used;
    `topology` the (slot, blueprint) pairs that it has from birth."""

    task: Task
    controller: Controller
    steps: int
    topology: Topology = ()
    counterfactuals: bool = True


@dataclass(frozen=True)
class Trained:
    """A network that was trained, before anyone has looked at test data."""

    plan: Plan
    outcome: EpisodeOutcome
    model: nn.Module
    topology: Topology
    cpu_seconds: float


def make_env(plan: Plan, data: DataSplits, key: int, recorder: Recorder | None) -> GrowthEnv:
    population = LoopedPopulation(plan.task.recipe(data, default_catalogue()), [key])
    return GrowthEnv(
        population,
        LifecycleRules(plan.steps),
        on_panic="continue",
        random_guess_loss=plan.task.random_guess_loss,
        recorder=recorder,
        keep_best=True,
        counterfactuals=plan.counterfactuals,
    )


def train(plan: Plan, data: DataSplits, key: int, recorder: Recorder | None = None) -> Trained:
    """Follow the plan on the training and validation parts of `data`.

    The host at birth and the order of its batches are functions of `key` alone, so that arms that
    share a key are a pair. Ctrl-C raises KeyboardInterrupt: half an episode is no result.
    """
    started = time.process_time()
    env = make_env(plan, data, key, recorder)
    ended = run_episode(env, plan.controller, topology=plan.topology)
    if ended == "interrupted":
        raise KeyboardInterrupt
    outcome = settle_outcome(
        env, 0, task=plan.task.name, controller=plan.controller.name, ended=ended
    )
    held = env.table.holds_seed[0].nonzero()[0].tolist()
    return Trained(
        plan,
        outcome,
        model=env.population.export(0),
        topology=tuple((slot, int(env.table.blueprint[0, slot])) for slot in held),
        cpu_seconds=time.process_time() - started,
    )


def first_situation(task: Task, data: DataSplits) -> Situation:
    """What every controller of an evaluation gets to see first, for some key."""
    return make_env(Plan(task, StaticController(), task.steps), data, 0, None).reset()


# --- networks that do not grow -------------------------------------------------------------------


def of_width(task: Task, width: int) -> Task:
    """The task with a host of another width."""
    assert task.host_of_width is not None, f"task {task.name!r} has no family of hosts"
    return replace(task, build=partial(task.host_of_width, width))


def static_plan(task: Task, steps: int, topology: Topology = ()) -> Plan:
    """A fixed network pays for no counterfactuals: nobody has to decide anything about it."""
    return Plan(task, StaticController(), steps, topology, counterfactuals=False)


def host_size(task: Task, data: DataSplits) -> tuple[int, int]:
    """(parameters, multiply-adds per example) of the task's host."""
    template = LoopedPopulation(task.recipe(data, default_catalogue()), [0]).template
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
