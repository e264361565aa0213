"""Plans: how the networks of an arm are trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from esper.leyline import EpisodeOutcome, Recorder
from esper.leyline.growth_settings import TRAINED_SCHEDULE
from esper.proof.compute import affordable_steps, fit_to_budget, host_size
from esper.tamiyo.controllers.static import StaticController
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.run import GrowthSettings, Topology, Trained, host_settings
from esper.tolaria.engine.run import train as train_networks
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks.base import Task

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
        train_networks(
            replace(plan.task.recipe(data), weights=plan.weights),
            keys,
            plan.rules,
            plan.controller,
            task=plan.task.name,
            recorder=recorder,
            attribute=attribute,
        )
    )


def complete(trained: list[Trained]) -> list[Trained]:
    """The same networks; raises KeyboardInterrupt if Ctrl-C ended one before its time."""
    if any(each.outcome.ended == "interrupted" for each in trained):
        raise KeyboardInterrupt
    return trained


# --- plans of networks that do not grow, and of hosts that arrive trained ------------------------


def static_plan(task: Task, steps: int, population: PopulationKind = "looped") -> Plan:
    """A fixed network, which needs no counterfactuals."""
    rules = GrowthSettings(
        steps, counterfactuals=False, population=population, schedule=task.schedule
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
        counterfactuals=controller is not DO_NOTHING,
        max_train_macs=budget,
        extra=extra,
        population=population,
    )
    return Plan(task, controller, rules)


def scratch_plan(task: Task, budget: int, population: PopulationKind = "looped") -> Plan:
    """A fixed network from scratch within `budget`, with the schedule of trained hosts."""
    rules = GrowthSettings(
        1,
        counterfactuals=False,
        schedule=TRAINED_SCHEDULE,
        max_train_macs=budget,
        population=population,
    )
    return Plan(task, DO_NOTHING, rules)
