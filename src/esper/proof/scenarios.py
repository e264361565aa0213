"""The arms of an evaluation: those that were asked for, and control arms.

scratch  Every arm starts with a new host. The controls are the grown topology from scratch, and the
         best fixed network with equal parameters or equal compute.
trained  Hosts are trained to their end first. Then every arm has the same extra budget, a share of
         what that training cost. The host trains on as it is, cooled, or growing; or another
         network is trained from scratch. All arms have the same schedule of the learning rate.

What arms choose for themselves, they choose on validation data of tuning keys. Every arm, control
arms included, has the same grid of learning rates and the same tuning keys.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any

from esper.leyline.growth_settings import GrowthSettings
from esper.proof.arms import (
    DO_NOTHING,
    Plan,
    Run,
    continued_plan,
    host_plan,
    resolve,
    scratch_plan,
    static_plan,
)
from esper.proof.compute import (
    extra_budget,
    first_epoch_macs,
    host_size,
    of_width,
    random_shapes,
    training_macs,
)
from esper.proof.jobs import Job, WorkerPool, run_jobs
from esper.proof.record import Record
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.run import Trained
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks import Task

STATIC_FINAL = "static-final"
STATIC_FINAL_EQUAL_COMPUTE = "static-final-equal-compute"
BEST_STATIC_EQUAL_PARAMS = "best-static-equal-params"
BEST_STATIC_EQUAL_COMPUTE = "best-static-equal-compute"

HOST = "host"
CONTINUE, CONTINUE_COOLED = "continue", "continue-cooled"
BEST_SCRATCH, FOUND_SCRATCH = "best-scratch", "found-scratch"
RANDOM_SHAPE = "random-shape"

# Multiples of the task's learning rate that `esper grow` tries for networks from scratch.
SCRATCH_RATES = (1.0, 3.0)


@dataclass(frozen=True)
class Arm:
    """An arm, or a candidate for one.

    width, shape  of its host, if it has another one than the task
    extra         its extra budget, in the scenario trained
    control_of    label of the arm that it is a control of
    versus        label of the arm that it is compared with
    """

    name: str
    plan: Plan
    width: int | None = None
    shape: tuple[int, ...] | None = None
    extra: float | None = None
    control_of: str | None = None
    versus: str | None = None

    @property
    def label(self) -> str:
        return labelled(self.name, self.extra)

    @property
    def learning_rate(self) -> float:
        return self.plan.task.learning_rate

    @property
    def tuning_label(self) -> str:
        words = [f"tuning {self.label}"]
        if self.width is not None:
            words.append(f"width {self.width}")
        if self.shape is not None:
            words.append(f"shape {'-'.join(map(str, self.shape))}")
        return ", ".join([*words, f"rate {self.learning_rate:.2g}"])


def labelled(name: str, extra: float | None) -> str:
    """The name of an arm with its extra budget."""
    return name if extra is None else f"{name} +{extra:g}"


@dataclass
class Bench:
    """What all arms share. `rates` is the grid of learning rates, `widths` has the tasks with hosts
    of other widths, and `runs` the runs of each tuning key by label."""

    task: Task
    data: DataSplits
    steps: int
    population: PopulationKind
    growth: GrowthSettings
    tuning_keys: tuple[int, ...]
    rates: tuple[float, ...]
    record: Record
    workers: WorkerPool
    progress: Callable[[str, int, int], None]
    widths: dict[int, Task] = field(init=False)
    runs: list[dict[str, Run]] = field(init=False)

    def __post_init__(self) -> None:
        # Made once: two tasks of the same width would not be equal.
        self.widths = {width: of_width(self.task, width) for width in self.task.widths}
        self.runs = [{} for _ in self.tuning_keys]

    def candidates(self, name: str, plan: Plan, **what: Any) -> list[Arm]:
        """An arm for every learning rate; `what` are further fields of it."""
        return [Arm(name, plan.with_rate(rate), **what) for rate in self.rates]

    def choose(self, groups: Sequence[Sequence[Arm]]) -> list[Arm]:
        """The best candidate of each group on validation; a single one is not trained."""
        tried = [arm for group in groups if len(group) > 1 for arm in group]
        trained = self._train({arm.tuning_label: arm.plan for arm in tried})
        scores = {label: _mean_validation(runs) for label, runs in trained.items()}
        return [max(each, key=lambda arm: scores.get(arm.tuning_label, 0.0)) for each in groups]

    def train(self, arm: Arm, tuning_label: str, *, keep: bool = False) -> list[Run]:
        """The runs of an arm on the tuning keys, from now on also for plans that name the arm."""
        runs = self._train({tuning_label: arm.plan}, keep=keep)[tuning_label]
        for own, run in zip(self.runs, runs, strict=True):
            own[arm.label] = run
        return runs

    def _train(self, plans: Mapping[str, Plan], keep: bool = False) -> dict[str, list[Run]]:
        jobs = [
            Job(label, plan, self.data, self.tuning_keys, self.runs, keep=keep)
            for label, plan in plans.items()
        ]
        labels, each = list(plans), len(self.tuning_keys)

        def on_start(job: Job) -> None:
            self.progress(job.label, each * labels.index(job.label), each * len(labels))

        return dict(zip(labels, run_jobs(jobs, self.record, self.workers, on_start), strict=True))


def _mean_validation(runs: Sequence[Run]) -> float:
    """The mean validation score; -inf if a network was never measured."""
    scores = [run.outcome.val_score for run in runs]
    return fmean(-math.inf if score is None else score for score in scores)


# --- new hosts -----------------------------------------------------------------------------------


def scratch_arms(
    bench: Bench, controllers: Mapping[str, Controller], reference: str | None
) -> list[Arm]:
    """An arm for each controller, then the controls of `reference`, if any."""
    rules = replace(
        bench.growth,
        steps=bench.steps,
        population=bench.population,
        schedule=bench.task.schedule,
    )
    arms = bench.choose(
        [
            bench.candidates(name, Plan(bench.task, each, rules))
            for name, each in controllers.items()
        ]
    )
    if reference is None:
        return arms
    (arm,) = (arm for arm in arms if arm.name == reference)
    found = bench.train(arm, arm.tuning_label)
    final = static_plan(bench.task, bench.steps, bench.population)
    final = replace(final, topology_from=reference)
    groups = [
        bench.candidates(STATIC_FINAL, final),
        bench.candidates(STATIC_FINAL_EQUAL_COMPUTE, replace(final, compute_from=reference)),
        *_best_static(bench, reference, found),
    ]
    return arms + [replace(control, control_of=reference) for control in bench.choose(groups)]


def _best_static(bench: Bench, reference: str, found: Sequence[Run]) -> list[list[Arm]]:
    """Candidates of each `best-static` control. `found` are the runs of the reference."""
    if not bench.widths:
        return []
    sizes = {width: host_size(task, bench.data) for width, task in bench.widths.items()}
    plans = {
        width: static_plan(task, bench.steps, bench.population)
        for width, task in bench.widths.items()
    }
    budget = min(run.outcome.train_macs for run in found)
    affordable = [
        width
        for width, (_, macs) in sizes.items()
        if training_macs(bench.task, bench.data, macs, steps=1) <= budget
    ] or [min(sizes, key=lambda width: sizes[width][1])]
    as_large = widths_up_to(sizes, median(run.outcome.params for run in found))
    return [
        [
            arm
            for width in widths
            for arm in bench.candidates(
                name, replace(plans[width], compute_from=compute_from), width=width
            )
        ]
        for name, widths, compute_from in (
            (BEST_STATIC_EQUAL_PARAMS, as_large, None),
            (BEST_STATIC_EQUAL_COMPUTE, affordable, reference),
        )
    ]


def widths_up_to(sizes: Mapping[int, tuple[int, int]], params: float) -> list[int]:
    """The width whose parameters are nearest to `params` (as a ratio), and all smaller ones."""
    nearest = min(sizes, key=lambda width: abs(math.log(sizes[width][0] / params)))
    return [width for width in sizes if sizes[width][0] <= sizes[nearest][0]]


# --- trained hosts -------------------------------------------------------------------------------


def trained_arms(
    bench: Bench,
    controllers: Mapping[str, Controller],
    reference: str | None,
    extras: Sequence[float],
) -> list[Arm]:
    """The trained hosts, then for each extra budget its arms: the host that trains on, those that
    grow, and the controls of `reference`, if any. Raises ConfigError if a budget does not pay for
    an epoch."""
    budgets = {each: extra_budget(bench.task, bench.data, bench.steps, each) for each in extras}
    host = Arm(HOST, host_plan(bench.task, bench.steps, bench.population))
    if reference is not None or len(bench.rates) > 1:
        bench.train(host, f"tuning {HOST}", keep=True)
    arms = bench.choose(
        [
            group
            for extra, budget in budgets.items()
            for group in _continued(bench, controllers, reference, extra, budget)
        ]
    )
    if reference is not None:
        found = {
            arm.extra: bench.train(arm, arm.tuning_label) for arm in arms if arm.name == reference
        }
        arms += bench.choose(
            [
                group
                for extra, budget in budgets.items()
                for group in _from_scratch(bench, reference, found[extra], extra, budget)
            ]
        )
    return [host, *sorted(arms, key=lambda arm: arm.extra or 0.0)]


def _continued(
    bench: Bench,
    controllers: Mapping[str, Controller],
    reference: str | None,
    extra: float,
    budget: int,
) -> list[list[Arm]]:
    """Candidates of the host that trains on, and of the arms that grow."""

    def candidates(
        name: str, controller: Controller, cooling: bool = True, **what: str | None
    ) -> list[Arm]:
        plan = continued_plan(
            bench.task,
            controller,
            budget,
            extra,
            cooling=cooling,
            population=bench.population,
            growth=bench.growth,
        )
        return bench.candidates(name, replace(plan, weights_from=HOST), extra=extra, **what)

    control_of = None if reference is None else labelled(reference, extra)
    groups = [candidates(CONTINUE, DO_NOTHING, cooling=False, control_of=control_of)]
    if reference is not None:
        groups.append(candidates(CONTINUE_COOLED, DO_NOTHING, control_of=control_of))
    for name, controller in controllers.items():
        versus = None if name == reference else labelled(CONTINUE, extra)
        groups.append(candidates(name, controller, versus=versus))
    return groups


def _from_scratch(
    bench: Bench, reference: str, found: Sequence[Run], extra: float, budget: int
) -> list[list[Arm]]:
    """Candidates of other networks that the budget could have been spent on. `found` are the runs
    of the reference."""
    grown = labelled(reference, extra)
    what: dict[str, Any] = {"extra": extra, "control_of": grown}
    plan = scratch_plan(bench.task, budget, bench.population)
    groups = [bench.candidates(FOUND_SCRATCH, replace(plan, topology_from=grown), **what)]
    widths = affordable_tasks(bench.widths, bench.data, budget)
    shapes = affordable_tasks(
        _random_shapes(bench.task, found, len(widths) or 1), bench.data, budget
    )
    for name, kind, tasks in ((BEST_SCRATCH, "width", widths), (RANDOM_SHAPE, "shape", shapes)):
        arms = [
            arm
            for size, task in tasks.items()
            for arm in bench.candidates(name, replace(plan, task=task), **{kind: size}, **what)
        ]
        if arms:
            groups.append(arms)
    return groups


def affordable_tasks(tasks: Mapping[Any, Task], data: DataSplits, budget: int) -> dict[Any, Task]:
    """Those whose hosts can be trained for an epoch."""
    return {
        size: task
        for size, task in tasks.items()
        if first_epoch_macs(task, data, host_size(task, data)[1]) <= budget
    }


def _random_shapes(task: Task, found: Sequence[Run], count: int) -> dict[tuple[int, ...], Task]:
    """Tasks with hosts of random shapes, about as large as what was grown."""
    build = task.host_of_widths
    if build is None:
        return {}
    grown = median(run.outcome.params for run in found)
    shapes = random_shapes(build, task.shape, grown, count)
    return {shape: replace(task, build=partial(build, shape)) for shape in shapes}


class RescuePlans:
    """Plans for a host that was trained for `steps`, within the share `extra` of what that cost.
    Raises ConfigError if this does not pay for an epoch."""

    def __init__(self, task: Task, data: DataSplits, steps: int, extra: float) -> None:
        self.task, self.data, self.steps, self.extra = task, data, steps, extra
        self.budget = extra_budget(task, data, steps, extra)

    def continued(
        self, host: Trained, controller: Controller = DO_NOTHING, *, cooling: bool = True
    ) -> Plan:
        """The host trains on, and grows if the controller decides so."""
        plan = continued_plan(self.task, controller, self.budget, self.extra, cooling=cooling)
        weights = {host.outcome.key: host.model.state_dict()}
        return replace(resolve(plan, self.data, {}), weights=weights)

    def from_scratch(self) -> list[Plan]:
        """New networks of every width that the budget pays for, at every rate."""
        tasks = {width: of_width(self.task, width) for width in self.task.widths}
        return [
            resolve(scratch_plan(task, self.budget).with_rate(rate), self.data, {})
            for task in affordable_tasks(tasks, self.data, self.budget).values()
            for rate in (factor * self.task.learning_rate for factor in SCRATCH_RATES)
        ]
