"""What to do with a trained host and a little more compute.

Hosts are trained to their end first; that is spent. Then every arm has the same extra budget, a
share of what the host's training cost: the host goes on as it is, cooled, or growing; or another
network is trained from scratch. All arms have one schedule of the learning rate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from torch import Tensor

from esper.leyline.constants import COOLING_SAMPLES
from esper.leyline.growth_settings import TRAINED_SCHEDULE, GrowthSettings, Topology
from esper.proof.arms import (
    DO_NOTHING,
    Plan,
    extra_budget,
    first_epoch_macs,
    host_plan,
    host_size,
    paced,
    training_macs,
)
from esper.proof.choices import Arm, Bench, PlanFor, labelled, mean_validation, with_rate
from esper.proof.shapes import random_shapes
from esper.proof.work import Run
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks.base import Task

HOST = "host"
CONTINUE, CONTINUE_COOLED = "continue", "continue-cooled"
BEST_SCRATCH, FOUND_SCRATCH = "best-scratch", "found-scratch"
RANDOM_SHAPE = "random-shape"

# A network that grows costs more with each epoch: with long ones it leaves much of a small budget.
LEAST_DECISIONS = 6


@dataclass(frozen=True)
class Hosts:
    """Trained hosts of one task, and their weights as they are met."""

    task: Task
    macs: int
    weights: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def met(self, known: Mapping[str, Run]) -> Mapping[int, Mapping[str, Tensor]]:
        """The weights of all hosts so far, with that of this key."""
        run = known[HOST]
        assert run.model is not None, "trained hosts are kept"
        self.weights[run.outcome.key] = run.model.state_dict()
        return self.weights


def going_on(controller: Controller, cooling: bool, extra: float) -> dict[str, Any]:
    """The rules of a trained host with an extra budget: nobody measures the seeds of one that has
    none."""
    return {
        "start": "trained",
        "cooling": cooling,
        "counterfactuals": controller is not DO_NOTHING,
        "extra": extra,
    }


def plan_within(
    budget: int,
    task: Task,
    data: DataSplits,
    macs: int,
    controller: Controller,
    rate: float,
    population: PopulationKind,
    **how: Any,
) -> Plan:
    """For networks of `macs` per example, which are trained for an epoch at least. What they may
    cost ends them, if they grow, before the steps do. `how` are further rules."""
    trained = how.get("start") == "trained"
    budget = max(budget, first_epoch_macs(task, data, macs, trained=trained))
    least = 1 if controller is DO_NOTHING else LEAST_DECISIONS
    looks = min(COOLING_SAMPLES, len(data.train_x)) if how.get("cooling") else 0
    task, epochs = paced(task, data, macs, budget, trained=trained, least=least, beside=looks)
    rules = GrowthSettings(
        max(1, epochs if trained else epochs - 1),
        schedule=TRAINED_SCHEDULE,
        max_train_macs=budget,
        population=population,
        **how,
    )
    return Plan(with_rate(task, rate), controller, rules)


@dataclass(frozen=True)
class Stage:
    """One extra budget, in multiply-adds. `known` are the runs of each tuning key, by label."""

    bench: Bench
    extra: float
    budget: int
    known: list[dict[str, Run]]

    def plan(self, task: Task, macs: int, controller: Controller, rate: float, **how: Any) -> Plan:
        bench = self.bench
        return plan_within(
            self.budget, task, bench.data, macs, controller, rate, bench.population, **how
        )

    def going_on(self, hosts: Hosts, controller: Controller, cooling: bool, rate: float) -> PlanFor:
        """A trained host, with what the controller makes of it."""
        plan = self.plan(
            hosts.task,
            hosts.macs,
            controller,
            rate,
            **going_on(controller, cooling, self.extra),
        )
        return lambda known: replace(plan, weights=hosts.met(known))

    def from_scratch(self, task: Task, macs: int, rate: float, topology: Topology = ()) -> Plan:
        """A fixed network: nobody has to decide anything about it."""
        return self.plan(task, macs, DO_NOTHING, rate, counterfactuals=False, topology=topology)

    def over_rates(self, name: str, plan: Callable[[float], PlanFor], **what: Any) -> list[Arm]:
        """A candidate for every learning rate."""
        rates = self.bench.rates
        return [Arm(name, plan(rate), rate, extra=self.extra, **what) for rate in rates]

    def choose(self, candidates: Sequence[Arm]) -> Arm:
        """The best on validation of the tuning keys; a single one needs no trial."""
        if len(candidates) == 1:
            return candidates[0]
        scores = [mean_validation(runs) for runs in self.runs(candidates)]
        return candidates[scores.index(max(scores))]

    def runs(self, arms: Sequence[Arm]) -> list[list[Run]]:
        """Of each arm those of the tuning keys."""
        return self.bench.runs(
            {tuning_label(arm): [arm.plan(known) for known in self.known] for arm in arms}
        )


def tuning_label(arm: Arm) -> str:
    words = [f"tuning {arm.label}"]
    if arm.width is not None:
        words.append(f"width {arm.width}")
    if arm.shape is not None:
        words.append(f"shape {'-'.join(map(str, arm.shape))}")
    return ", ".join([*words, f"rate {arm.learning_rate:.2g}"])


def choose_scenario(
    bench: Bench,
    controllers: Mapping[str, Controller],
    reference: str | None,
    extras: Sequence[float],
) -> list[Arm]:
    """The trained hosts, then for each extra budget its arms: the host that goes on, those that
    grow, and the controls for `reference`, if any. Raises ConfigError if a budget does not pay for
    an epoch."""
    hosts = Hosts(bench.task, host_size(bench.task, bench.data)[1])
    cost = training_macs(bench.task, bench.data, hosts.macs, bench.steps)
    budgets = [extra_budget(bench.task, bench.data, hosts.macs, cost, extra) for extra in extras]
    host = _host_arm(bench)
    chosen = reference is not None or len(bench.rates) > 1
    known = [{HOST: run} for run in _trained_hosts(bench, host)] if chosen else []
    stages = [
        Stage(bench, extra, budget, known) for extra, budget in zip(extras, budgets, strict=True)
    ]
    arms = {stage.extra: _growing(stage, hosts, controllers, reference) for stage in stages}
    if reference is not None:
        found = {s.extra: _found(s, arms[s.extra], reference) for s in stages}
        for stage in stages:
            arms[stage.extra] += _scratch(stage, reference, found[stage.extra])
    return [host] + [arm for stage in stages for arm in arms[stage.extra]]


# --- hosts ---------------------------------------------------------------------------------------


def _host_arm(bench: Bench) -> Arm:
    plan = host_plan(bench.task, bench.steps, bench.population)
    return Arm(HOST, lambda _: plan, bench.task.learning_rate)


def _trained_hosts(bench: Bench, arm: Arm) -> list[Run]:
    """Those of the tuning keys."""
    plans = [arm.plan({})] * len(bench.tuning_keys)
    (runs,) = bench.runs({f"tuning {arm.name}": plans}, keep=True)
    return runs


# --- arms of one extra budget --------------------------------------------------------------------


def _growing(
    stage: Stage, hosts: Hosts, controllers: Mapping[str, Controller], reference: str | None
) -> list[Arm]:
    """The host that goes on, and the arms that grow."""
    control_of = None if reference is None else labelled(reference, stage.extra)
    names = ((CONTINUE, False), (CONTINUE_COOLED, True))[: 1 if reference is None else 2]
    arms = [
        stage.choose(
            stage.over_rates(
                name,
                partial(stage.going_on, hosts, DO_NOTHING, cooling),
                control_of=control_of,
            )
        )
        for name, cooling in names
    ]
    for name, controller in controllers.items():
        versus = None if name == reference else arms[0].label
        plan = partial(stage.going_on, hosts, controller, True)
        arms.append(stage.choose(stage.over_rates(name, plan, versus=versus)))
    return arms


def _found(stage: Stage, arms: Sequence[Arm], reference: str) -> list[Run]:
    """What the reference arm reaches on the tuning keys, which is known from now on."""
    (arm,) = (arm for arm in arms if arm.name == reference)
    (runs,) = stage.runs([arm])
    for known, run in zip(stage.known, runs, strict=True):
        known[arm.label] = run
    return runs


def _scratch(stage: Stage, reference: str, found: Sequence[Run]) -> list[Arm]:
    """What else the budget could have been spent on: other networks, from scratch."""
    bench, control_of = stage.bench, labelled(reference, stage.extra)

    def found_plan(rate: float) -> PlanFor:
        def plan(known: Mapping[str, Run]) -> Plan:
            run = known[control_of]
            return stage.from_scratch(bench.task, run.outcome.macs, rate, run.topology)

        return plan

    arms = [stage.choose(stage.over_rates(FOUND_SCRATCH, found_plan, control_of=control_of))]
    widths = _paid(stage, [Other(task, width=width) for width, task in bench.widths.items()])
    shapes = _paid(stage, _random_shapes(bench, found, tries=len(widths) or 1))
    for name, others in ((BEST_SCRATCH, widths), (RANDOM_SHAPE, shapes)):
        if others:
            best = stage.choose(_candidates(stage, name, others))
            arms.append(replace(best, control_of=control_of))
    return arms


@dataclass(frozen=True)
class Other:
    """Another host of the task's family."""

    task: Task
    width: int | None = None
    shape: tuple[int, ...] | None = None


def _candidates(stage: Stage, name: str, others: Sequence[Other]) -> list[Arm]:
    """Every host with every rate, from scratch."""

    def always(plan: Plan) -> PlanFor:
        return lambda known: plan

    bench = stage.bench
    return [
        Arm(
            name,
            always(stage.from_scratch(other.task, host_size(other.task, bench.data)[1], rate)),
            rate,
            width=other.width,
            shape=other.shape,
            extra=stage.extra,
        )
        for other, rate in product(others, bench.rates)
    ]


def _paid(stage: Stage, others: Sequence[Other]) -> list[Other]:
    """Those of which the budget pays for an epoch."""
    task, data = stage.bench.task, stage.bench.data
    return [
        other
        for other in others
        if first_epoch_macs(task, data, host_size(other.task, data)[1]) <= stage.budget
    ]


def _random_shapes(bench: Bench, found: Sequence[Run], tries: int) -> list[Other]:
    """As large as what was grown."""
    build = bench.task.host_of_widths
    if build is None:
        return []
    grown = median(run.outcome.params for run in found)
    shapes = random_shapes(build, bench.task.shape, grown, tries)
    return [Other(replace(bench.task, build=partial(build, each)), shape=each) for each in shapes]
