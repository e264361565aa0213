"""Jobs of an evaluation: which networks are trained, and in which order."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Protocol

from esper.proof.arms import Plan, Run, WorkItem, WorkResults, resolve, train_item
from esper.proof.record import Record
from esper.tolaria.data.splits import DataSplits


@dataclass(frozen=True)
class Job:
    """Networks under one label, one for each of `keys`.

    plan       may take weights, topology or compute from other runs of the same key
    runs       for each key its runs by label; those of the job are added
    attribute  measure the contribution of seeds, if they grow
    keep       keep the networks
    """

    label: str
    plan: Plan
    data: DataSplits
    keys: Sequence[int]
    runs: Sequence[dict[str, Run]]
    attribute: bool = False
    keep: bool = False

    @property
    def ready(self) -> bool:
        return all(self.plan.sources <= runs.keys() for runs in self.runs)

    def resolved(self) -> dict[int, Plan]:
        """The plan of each key."""
        pairs = zip(self.keys, self.runs, strict=True)
        return {key: resolve(self.plan, self.data, runs) for key, runs in pairs}

    def items(self, plans: dict[int, Plan], events: bool) -> Iterator[WorkItem]:
        """One for the keys of each different plan."""
        attribute = self.attribute and self.plan.rules.counterfactuals != "none"
        left = dict(plans)
        while left:
            plan = next(iter(left.values()))
            own = {key: left.pop(key) for key, each in plans.items() if each == plan}
            if plan.weights is not None:
                weights = {k: w for each in own.values() for k, w in (each.weights or {}).items()}
                plan = replace(plan, weights=weights)
            yield WorkItem(plan, self.data, tuple(own), attribute, self.keep, events and self.keep)

    def add(self, found: dict[int, Run]) -> list[Run]:
        """Add the runs that were found by key."""
        for key, runs in zip(self.keys, self.runs, strict=True):
            runs[self.label] = found[key]
        return [found[key] for key in self.keys]


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


def run_jobs(
    jobs: Sequence[Job],
    record: Record,
    workers: WorkerPool,
    on_start: Callable[[Job], None] = lambda job: None,
) -> Iterator[list[Run]]:
    """The runs of each job, in order, as soon as they are recorded.

    A job starts when the pool has capacity and all runs that its plan names are there, earlier jobs
    first. A job must come after those that it depends on.
    """
    waiting, running = dict(enumerate(jobs)), dict[int, list[Future[WorkResults]]]()
    done: dict[int, list[Run]] = {}
    new: dict[int, WorkResults] = {}
    for turn, job in enumerate(jobs):
        while turn not in done:
            for number, each in list(waiting.items()):
                if sum(map(len, running.values())) >= workers.capacity:
                    break
                if not each.ready:
                    continue
                del waiting[number]
                on_start(each)
                plans = each.resolved()
                recorded = record.read(each.label, each.data, plans)
                if recorded is not None:
                    done[number] = each.add(recorded)
                    continue
                items = each.items(plans, record.keeps_events)
                running[number] = [workers.submit(item) for item in items]
            if not running and turn not in done:
                missing = job.plan.sources - job.runs[0].keys()
                raise ValueError(f"{job.label} needs {missing}, which no earlier job trains")
            futures = [future for each in running.values() for future in each]
            wait([each for each in futures if not each.done()], return_when=FIRST_COMPLETED)
            for number in [n for n, each in running.items() if all(f.done() for f in each)]:
                results = [each.result() for each in running.pop(number)]
                new[number] = {key: found for each in results for key, found in each.items()}
                runs = {key: found.run for key, found in new[number].items()}
                done[number] = jobs[number].add(runs)
        if turn in new:
            record.add(job.label, job.keys, new.pop(turn))
        yield done.pop(turn)
