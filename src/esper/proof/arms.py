"""Plans: how the networks of an arm, and the hosts of a family, are trained.

A work item has networks of one plan, which are trained here or on another machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from esper.growth.snapshot import HostSnapshot, take_snapshot
from esper.leyline import EpisodeOutcome, EsperError, History, Recorder
from esper.leyline.growth_settings import TRAINED_SCHEDULE
from esper.proof.compute import affordable_steps, fit_to_budget, host_size
from esper.tamiyo.controllers.simple import StaticController
from esper.tamiyo.situation import Controller, GivesReasons
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthSettings, Topology, Trained, host_settings, play_run
from esper.tolaria.families.base import Family, Member
from esper.tolaria.families.hosts import hosts_of
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks import Task

DO_NOTHING = StaticController()


@dataclass(frozen=True)
class Run:
    """A trained network and its outcome. `model` is None if it is not going to be tested."""

    outcome: EpisodeOutcome
    topology: Topology
    cpu_seconds: float
    model: nn.Module | None


@dataclass(frozen=True)
class Plan:
    """How networks are trained. `task` holds the host and the learning rate. Networks of equal
    plans can be trained together.

    weights        of hosts that arrive trained, by key
    weights_from   label of the run of the same key whose weights the host starts with
    topology_from  label of the run of the same key whose topology the network has from the start
    compute_from   label of the run of the same key whose training cost decides the steps
    """

    task: Task
    controller: Controller
    rules: GrowthSettings
    weights: Mapping[int, Mapping[str, Tensor]] | None = field(default=None, compare=False)
    weights_from: str | None = None
    topology_from: str | None = None
    compute_from: str | None = None

    @property
    def sources(self) -> set[str]:
        """Labels of the runs that must be there before this plan can be followed."""
        return {self.weights_from, self.topology_from, self.compute_from} - {None}  # type: ignore[return-value]

    def with_rate(self, rate: float) -> "Plan":
        return replace(self, task=replace(self.task, learning_rate=rate))


def resolve(plan: Plan, data: DataSplits, runs: Mapping[str, Run]) -> Plan:
    """The plan for one key, with what it takes from `runs`, the runs of that key by label, and with
    the steps that its compute budget pays for."""
    task, rules, weights = plan.task, plan.rules, plan.weights
    if plan.weights_from is not None:
        host = runs[plan.weights_from]
        assert host.model is not None, "networks of hosts are kept"
        weights = {host.outcome.key: host.model.state_dict()}
    if plan.topology_from is not None:
        rules = replace(rules, topology=runs[plan.topology_from].topology)
    if plan.compute_from is not None or rules.max_train_macs is not None:
        if plan.topology_from is None:
            _, macs = host_size(task, data)
        else:
            macs = runs[plan.topology_from].outcome.macs
        if plan.compute_from is not None:
            spent = runs[plan.compute_from].outcome.train_macs
            rules = replace(rules, steps=affordable_steps(task, data, macs, spent))
        else:
            task, rules = fit_to_budget(task, rules, data, macs)
    return replace(plan, task=task, rules=rules, weights=weights)


def train(
    plan: Plan,
    data: DataSplits,
    keys: Sequence[int],
    recorder: Recorder | None = None,
    *,
    attribute: bool = False,
) -> list[Trained]:
    """Train one network for each key, all together, on the training and validation parts of `data`.

    Ctrl-C raises KeyboardInterrupt: half an episode is no result.
    """
    return complete(
        play_run(
            replace(plan.task.recipe(data), weights=plan.weights),
            keys,
            plan.rules,
            plan.controller,
            recorder,
            task=plan.task.name,
            attribute=attribute,
        )
    )


def complete(trained: list[Trained]) -> list[Trained]:
    """The same networks; raises KeyboardInterrupt if Ctrl-C ended one before its time."""
    if any(each.outcome.ended == "interrupted" for each in trained):
        raise KeyboardInterrupt
    return trained


@dataclass(frozen=True)
class WorkItem:
    """Networks of one plan. They are trained together, because rounding may depend on that.

    attribute  measure the contribution of seeds
    keep       return the networks too
    events     return the history too, if the controller gives reasons
    """

    plan: Plan
    data: DataSplits
    keys: tuple[int, ...]
    attribute: bool
    keep: bool
    events: bool


@dataclass(frozen=True)
class WorkResult:
    """A trained network of a work item, with what was asked for."""

    run: Run
    snapshot: HostSnapshot | None
    history: History | None


WorkResults = dict[int, WorkResult]  # by key


def train_item(item: WorkItem) -> WorkResults:
    """Ctrl-C raises KeyboardInterrupt."""
    keep = item.keep
    gives_reasons = isinstance(item.plan.controller, GivesReasons)
    history = History() if item.events and gives_reasons else None
    trained = train(item.plan, item.data, item.keys, history, attribute=item.attribute)
    return {
        key: WorkResult(
            Run(each.outcome, each.topology, each.cpu_seconds, each.model if keep else None),
            take_snapshot(each.network, None) if keep else None,
            None if history is None else history.of(env),
        )
        for env, (key, each) in enumerate(zip(item.keys, trained, strict=True))
    }


# --- plans of networks that do not grow, and of hosts that arrive trained ------------------------


def static_plan(task: Task, steps: int, population: PopulationKind = "looped") -> Plan:
    """A fixed network, which needs no counterfactuals."""
    rules = GrowthSettings(
        steps, counterfactuals="none", population=population, schedule=task.schedule
    )
    return Plan(task, DO_NOTHING, rules)


def host_plan(task: Task, steps: int, population: PopulationKind = "looped") -> Plan:
    """A host that is trained to its end, to be grown after that."""
    return Plan(task, DO_NOTHING, host_settings(steps, task.schedule, population))


def continued_plan(
    task: Task,
    controller: Controller,
    budget: int,
    extra: float,
    *,
    cooling: bool = True,
    population: PopulationKind = "looped",
    growth: GrowthSettings | None = None,
) -> Plan:
    """A trained host that trains on, and grows if its controller decides so, within `budget`, the
    share `extra` of what its training cost."""
    rules = replace(
        growth or GrowthSettings(),
        steps=1,
        start="trained",
        cooling=cooling,
        counterfactuals="none" if controller is DO_NOTHING else "trial",
        max_train_macs=budget,
        extra=extra,
        population=population,
    )
    return Plan(task, controller, rules)


def scratch_plan(task: Task, budget: int, population: PopulationKind = "looped") -> Plan:
    """A fixed network from scratch within `budget`, with the schedule of trained hosts."""
    rules = GrowthSettings(
        1,
        counterfactuals="none",
        schedule=TRAINED_SCHEDULE,
        max_train_macs=budget,
        population=population,
    )
    return Plan(task, DO_NOTHING, rules)


def validation_score(
    family: Family,
    controller: Controller,
    data: DataSplits,
    root: Path,
    *,
    population: PopulationKind = "fused",
) -> float:
    """Mean validation score of a controller on all validation hosts of a family. Hosts that were
    never measured do not count. Test data are not read."""
    scores: list[float] = []
    for member in family.members("validation"):
        _, trained = play_member(member, controller, data, root, member.keys, population)
        known = (each.outcome.val_score for each in trained)
        scores += [score for score in known if score is not None]
    if not scores:
        raise EsperError(f"no validation host of {family.name} could be trained")
    return float(np.mean(scores))


def play_member(
    member: Member,
    controller: Controller,
    data: DataSplits,
    root: Path,
    keys: Sequence[int],
    population: PopulationKind = "fused",
    recorder: Recorder | None = None,
) -> tuple[HostRecipe, list[Trained]]:
    """The recipe of a member's hosts, and an episode on the host of each of `keys`.

    Ctrl-C raises KeyboardInterrupt: half an episode is no result.
    """
    hosts = hosts_of(member, data, root)
    recipe = replace(member.recipe(data), weights=hosts.weights)
    rules = member.rules(data, hosts.cost, population)
    if isinstance(controller, StaticController):
        rules = replace(rules, counterfactuals="none")
    name = member.task.name
    return recipe, complete(play_run(recipe, keys, rules, controller, recorder, task=name))
