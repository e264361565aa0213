"""Work items: networks to train, here or on the machines of a worker pool."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from esper.growth.snapshot import HostSnapshot
from esper.leyline import History
from esper.proof.arms import Plan, Run, train
from esper.tamiyo.situation import GivesReasons
from esper.tolaria.data.splits import DataSplits


@dataclass(frozen=True)
class WorkItem:
    """Networks of one plan. They are trained together, because rounding may depend on that.

    attribute  measure what seeds are worth
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
    """What came of a work item, by key; `snapshots` and `histories` only if they were asked for."""

    runs: dict[int, Run]
    snapshots: dict[int, HostSnapshot]
    histories: dict[int, History]

    @classmethod
    def merged(cls, results: Sequence["WorkResult"]) -> "WorkResult":
        return cls(
            {key: value for each in results for key, value in each.runs.items()},
            {key: value for each in results for key, value in each.snapshots.items()},
            {key: value for each in results for key, value in each.histories.items()},
        )


def train_item(item: WorkItem) -> WorkResult:
    """Ctrl-C raises KeyboardInterrupt."""
    keep, keys = item.keep, item.keys
    gives_reasons = isinstance(item.plan.controller, GivesReasons)
    history = History() if item.events and gives_reasons else None
    trained = train(item.plan, item.data, keys, history, attribute=item.attribute)
    runs = [
        Run(each.outcome, each.topology, each.cpu_seconds, each.model if keep else None)
        for each in trained
    ]
    snapshots = [each.snapshot for each in trained]
    return WorkResult(
        dict(zip(keys, runs, strict=True)),
        dict(zip(keys, snapshots, strict=True)) if keep else {},
        {} if history is None else {key: history.of(env) for env, key in enumerate(keys)},
    )


class WorkerPool(Protocol):
    """Trains up to `capacity` work items at a time."""

    @property
    def capacity(self) -> int: ...

    def submit(self, item: WorkItem) -> "Future[WorkResult]": ...


class LocalWorker:
    """Trains each work item at once, in this process."""

    capacity = 1

    def submit(self, item: WorkItem) -> "Future[WorkResult]":
        future: Future[WorkResult] = Future()
        future.set_result(train_item(item))
        return future
