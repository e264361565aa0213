"""Work items: networks to train, here or on the machines of a worker pool."""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from esper.growth.snapshot import HostSnapshot
from esper.leyline import History
from esper.proof.arms import Plan, Run, train
from esper.tamiyo.situation import GivesReasons
from esper.tolaria.data.splits import DataSplits


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


# By key.
WorkResults = dict[int, WorkResult]


def train_item(item: WorkItem) -> WorkResults:
    """Ctrl-C raises KeyboardInterrupt."""
    keep = item.keep
    gives_reasons = isinstance(item.plan.controller, GivesReasons)
    history = History() if item.events and gives_reasons else None
    trained = train(item.plan, item.data, item.keys, history, attribute=item.attribute)
    return {
        key: WorkResult(
            Run(each.outcome, each.topology, each.cpu_seconds, each.model if keep else None),
            each.snapshot if keep else None,
            None if history is None else history.of(env),
        )
        for env, (key, each) in enumerate(zip(item.keys, trained, strict=True))
    }


class WorkerPool(Protocol):
    """Trains up to `capacity` work items at a time."""

    @property
    def capacity(self) -> int: ...

    def submit(self, item: WorkItem) -> "Future[WorkResults]": ...


class LocalWorker:
    """Trains each work item at once, in this process and on this device."""

    capacity = 1

    def __init__(self, device: str | None = None) -> None:
        self.device = device

    def submit(self, item: WorkItem) -> "Future[WorkResults]":
        rules = replace(item.plan.rules, device=self.device)
        future: Future[WorkResults] = Future()
        future.set_result(train_item(replace(item, plan=replace(item.plan, rules=rules))))
        return future
