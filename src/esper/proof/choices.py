"""What the arms of an evaluation choose for themselves, on validation data of tuning keys.

Every arm has the same budget: the same grid of learning rates, the same tuning keys. The controls
choose theirs like all others, and the best static network also its width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import fmean, median

from esper.leyline.growth_settings import GrowthSettings
from esper.proof.arms import (
    Plan,
    affordable_steps,
    host_size,
    of_width,
    static_plan,
    training_macs,
)
from esper.proof.record import Record
from esper.proof.work import Crew, Job, Run, carry_out
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks.base import Task

STATIC_FINAL = "static-final"
STATIC_FINAL_EQUAL_COMPUTE = "static-final-equal-compute"
BEST_STATIC_EQUAL_PARAMS = "best-static-equal-params"
BEST_STATIC_EQUAL_COMPUTE = "best-static-equal-compute"

# How an arm is trained on a key, given what the arms before it reached on the same key.
PlanFor = Callable[[Mapping[str, Run]], Plan]


@dataclass(frozen=True)
class Arm:
    """An arm with all its choices made.

    extra       the extra budget that it has, of a scenario with some
    control_of  label of the arm that it is a control of
    versus      label of the arm that it is compared with
    """

    name: str
    plan: PlanFor
    learning_rate: float
    width: int | None = None
    control_of: str | None = None
    shape: tuple[int, ...] | None = None
    extra: float | None = None
    versus: str | None = None

    @property
    def label(self) -> str:
        return labelled(self.name, self.extra)


def labelled(name: str, extra: float | None) -> str:
    """The name of an arm with its extra budget."""
    return name if extra is None else f"{name} +{extra:g}"


@dataclass
class Bench:
    """Task, data and budget that all arms share, and who trains. `rates` is the grid of learning
    rates."""

    task: Task
    data: DataSplits
    steps: int
    population: PopulationKind
    tuning_keys: tuple[int, ...]
    rates: tuple[float, ...]
    record: Record
    crew: Crew
    progress: Callable[[str, int, int], None]
    tuned_anything: bool = field(default=False, init=False)
    widths: dict[int, Task] = field(init=False)

    def __post_init__(self) -> None:
        # Made once: two tasks of the same width would not be equal.
        self.widths = {width: of_width(self.task, width) for width in self.task.widths}

    def growing_plan(self, controller: Controller, rate: float) -> Plan:
        rules = GrowthSettings(self.steps, population=self.population, schedule=self.task.schedule)
        return Plan(with_rate(self.task, rate), controller, rules)

    def runs(self, trials: Mapping[str, Sequence[Plan]], keep: bool = False) -> list[list[Run]]:
        """Under each label one plan for each tuning key, trained. No two ways of training have the
        same label."""
        self.tuned_anything = True
        jobs = [
            Job(label, partial(_given, plans), self.data, self.tuning_keys, keep=keep)
            for label, plans in trials.items()
        ]
        labels, each = list(trials), len(self.tuning_keys)

        def begun(job: Job) -> None:
            self.progress(job.label, each * labels.index(job.label), each * len(labels))

        return list(carry_out(jobs, self.record, self.crew, begun))


def _given(plans: Sequence[Plan]) -> Sequence[Plan]:
    return plans


def with_rate(task: Task, rate: float) -> Task:
    return replace(task, learning_rate=rate)


def mean_validation(runs: Sequence[Run]) -> float:
    """A network that was never measured is worth nothing."""
    scores = [run.outcome.val_score for run in runs]
    return fmean(-math.inf if score is None else score for score in scores)


def choose_arms(
    bench: Bench, controllers: Mapping[str, Controller], reference: str | None
) -> list[Arm]:
    """The arms in their order, then the controls for `reference`, if any."""
    tuned = [name for name in controllers if len(bench.rates) > 1 or name == reference]
    tried = (
        bench.runs(
            {
                f"tuning {name}, rate {rate:.2g}": (
                    [bench.growing_plan(controllers[name], rate)] * len(bench.tuning_keys)
                )
                for name, rate in product(tuned, bench.rates)
            }
        )
        if tuned
        else []
    )
    found = dict(zip(product(tuned, bench.rates), tried, strict=True))

    def best_rate(name: str) -> float:
        if name not in tuned:
            return bench.rates[0]
        return max(bench.rates, key=lambda rate: mean_validation(found[name, rate]))

    rates = {name: best_rate(name) for name in controllers}
    arms = [_own_arm(bench, name, each, rates[name]) for name, each in controllers.items()]
    if reference is None:
        return arms
    return arms + choose_controls(bench, reference, found[reference, rates[reference]])


def _own_arm(bench: Bench, name: str, controller: Controller, rate: float) -> Arm:
    plan = bench.growing_plan(controller, rate)
    return Arm(name, lambda _: plan, rate)


def choose_controls(bench: Bench, reference: str, found: Sequence[Run]) -> list[Arm]:
    """`found` is what the reference arm reached on the tuning keys."""
    arms = [
        _choose_final(bench, name, reference, found, steps_of)
        for name, steps_of in (
            (STATIC_FINAL, lambda run: bench.steps),
            (STATIC_FINAL_EQUAL_COMPUTE, lambda run: steps_for_compute(bench, run)),
        )
    ]
    if bench.task.host_of_width is not None:
        sizes = {w: host_size(task, bench.data) for w, task in bench.widths.items()}
        arms.append(_choose_equal_params(bench, reference, found, sizes))
        arms.append(_choose_equal_compute(bench, reference, found, sizes))
    return arms


def steps_for_compute(bench: Bench, run: Run) -> int:
    """Epochs of the topology that `run` found, for the compute that the run spent to find it."""
    outcome = run.outcome
    return affordable_steps(bench.task, bench.data, outcome.macs, outcome.train_macs)


def _choose_final(
    bench: Bench,
    name: str,
    reference: str,
    found: Sequence[Run],
    steps_of: Callable[[Run], int],
) -> Arm:
    """The topology that the reference arm finds on a key, from scratch on the same key."""

    def plan(run: Run, rate: float) -> Plan:
        task = with_rate(bench.task, rate)
        return static_plan(task, steps_of(run), run.topology, bench.population)

    rate = bench.rates[0]
    if len(bench.rates) > 1:
        tried = bench.runs(
            {f"tuning {name}, rate {r:.2g}": [plan(run, r) for run in found] for r in bench.rates}
        )
        scores = dict(zip(bench.rates, map(mean_validation, tried), strict=True))
        rate = max(scores, key=scores.__getitem__)
    return Arm(name, lambda runs: plan(runs[reference], rate), rate, control_of=reference)


def widths_up_to(sizes: Mapping[int, tuple[int, int]], params: float) -> list[int]:
    """The width whose parameters are nearest to `params` (as a ratio), and all smaller ones."""
    nearest = min(sizes, key=lambda width: abs(math.log(sizes[width][0] / params)))
    return [width for width in sizes if sizes[width][0] <= sizes[nearest][0]]


def _choose_equal_params(
    bench: Bench,
    reference: str,
    found: Sequence[Run],
    sizes: Mapping[int, tuple[int, int]],
) -> Arm:
    """Best width that is no larger than what the reference arm grows, trained as long."""

    def plan(width: int, rate: float, _: Run) -> Plan:
        task = with_rate(bench.widths[width], rate)
        return static_plan(task, bench.steps, population=bench.population)

    widths = widths_up_to(sizes, median(run.outcome.params for run in found))
    return _choose_width(bench, BEST_STATIC_EQUAL_PARAMS, reference, found, widths, plan)


def _choose_equal_compute(
    bench: Bench,
    reference: str,
    found: Sequence[Run],
    sizes: Mapping[int, tuple[int, int]],
) -> Arm:
    """Best width for the compute that the reference arm spends on the same key."""

    def plan(width: int, rate: float, run: Run) -> Plan:
        task = with_rate(bench.widths[width], rate)
        steps = affordable_steps(task, bench.data, sizes[width][1], run.outcome.train_macs)
        return static_plan(task, steps, population=bench.population)

    budget = min(run.outcome.train_macs for run in found)
    widths = [
        width
        for width, (_, macs) in sizes.items()
        if training_macs(bench.task, bench.data, macs, steps=1) <= budget
    ] or [min(sizes, key=lambda width: sizes[width][1])]
    return _choose_width(bench, BEST_STATIC_EQUAL_COMPUTE, reference, found, widths, plan)


def _choose_width(
    bench: Bench,
    name: str,
    reference: str,
    found: Sequence[Run],
    widths: Sequence[int],
    plan: Callable[[int, float, Run], Plan],
) -> Arm:
    candidates = list(product(widths, bench.rates))
    tried = bench.runs(
        {
            f"tuning {name}, width {width}, rate {rate:.2g}": [plan(width, rate, r) for r in found]
            for width, rate in candidates
        }
    )
    scores = dict(zip(candidates, map(mean_validation, tried), strict=True))
    width, rate = max(scores, key=scores.__getitem__)
    return Arm(
        name,
        lambda runs: plan(width, rate, runs[reference]),
        rate,
        width=width,
        control_of=reference,
    )
