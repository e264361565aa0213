"""Jobs that depend on each other, run by many workers: the order of the record is fixed."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from esper.proof import jobs as module
from esper.proof.arms import WorkItem, WorkResult, WorkResults
from esper.proof.jobs import Job, run_jobs


class Notes:
    """A record that keeps the labels of what is added, and knows some runs from before."""

    keeps_events = False

    def __init__(self, **known: dict[int, Any]) -> None:
        self.known, self.added = known, []

    def read(self, label: str, data: Any, plans: Any) -> Any:
        return self.known.get(label)

    def add(self, label: str, keys: Any, result: WorkResults) -> None:
        self.added.append(label)


class SlowFirst:
    """A pool that finishes its first work item only when the last one is submitted."""

    capacity = 10

    def __init__(self, last: str) -> None:
        self.last, self.submitted, self.first = last, [], Future()

    def submit(self, item: WorkItem) -> "Future[WorkResults]":
        label = item.plan.label  # type: ignore[attr-defined]
        result = {key: WorkResult(f"{label}{key}", None, None) for key in item.keys}  # type: ignore[arg-type]
        future: Future[WorkResults] = Future() if self.submitted else self.first
        self.submitted.append(f"{label}{''.join(map(str, item.keys))}")
        if self.submitted[0] == self.submitted[-1]:
            self.held = result
        else:
            future.set_result(result)
        if label == self.last:
            self.first.set_result(self.held)
        return future


@pytest.fixture(autouse=True)
def nothing_to_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "resolve", lambda plan, data, runs: plan)


def make_jobs(**sources: set[str]) -> list[Job]:
    """A job for each label, which depends on the runs that are named."""
    runs: list[dict[str, Any]] = [{}, {}]
    rules = SimpleNamespace(counterfactuals="none")
    return [
        Job(
            label,
            SimpleNamespace(label=label, rules=rules, weights=None, sources=needed),  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            (1, 2),
            runs,
        )
        for label, needed in sources.items()
    ]


def test_jobs_are_recorded_in_order_whichever_ends_first() -> None:
    jobs = make_jobs(a=set(), b=set(), c={"b"}, d=set())
    workers, notes, started = SlowFirst(last="d"), Notes(), list[str]()
    found = list(run_jobs(jobs, notes, workers, lambda job: started.append(job.label)))  # type: ignore[arg-type]
    assert started == ["a", "b", "d", "c"], "c waits for b, d does not wait for c"
    assert workers.submitted == ["a12", "b12", "d12", "c12"], "keys of one plan are one work item"
    assert found == [[f"{label}1", f"{label}2"] for label in "abcd"]
    assert notes.added == ["a", "b", "c", "d"]


def test_recorded_runs_are_not_trained_again() -> None:
    jobs = make_jobs(a=set(), b={"a"})
    workers, notes = SlowFirst(last="b"), Notes(a={1: "old1", 2: "old2"})
    found = list(run_jobs(jobs, notes, workers))  # type: ignore[arg-type]
    assert found == [["old1", "old2"], ["b1", "b2"]]
    assert (workers.submitted, notes.added) == (["b12"], ["b"])


def test_a_job_that_depends_on_a_missing_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a needs .*nothing"):
        list(run_jobs(make_jobs(a={"nothing"}), Notes(), SlowFirst(last="a")))  # type: ignore[arg-type]
