"""Jobs that wait for each other, carried out by many: the order in which they are kept is fixed."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from esper.proof import Job, Made, Piece, carry_out


class Notes:
    """Keeps the labels of what is added, and knows some runs from before."""

    listens = False

    def __init__(self, **known: list[Any]) -> None:
        self.known, self.added = known, []

    def read(self, job: Job, plans: Any) -> Any:
        return self.known.get(job.label)

    def add(self, job: Job, made: Any) -> None:
        self.added.append(job.label)


class SlowFirst:
    """Is done with the first piece only when the last one is begun."""

    room = 10

    def __init__(self, last: str) -> None:
        self.last, self.begun, self.first = last, [], Future()

    def begin(self, piece: Piece) -> "Future[Made]":
        label = piece.plan.label  # type: ignore[attr-defined]
        made = Made({key: f"{label}{key}" for key in piece.keys}, {}, {})  # type: ignore[misc]
        future: Future[Made] = Future() if self.begun else self.first
        self.begun.append(f"{label}{''.join(map(str, piece.keys))}")
        if self.begun[0] == self.begun[-1]:
            self.held = made
        else:
            future.set_result(made)
        if label == self.last:
            self.first.set_result(self.held)
        return future


def job(label: str, known: dict[str, Any], needs: str | None = None) -> Job:
    def plans() -> list[Any]:
        if needs is not None:
            known[needs]
        rules = SimpleNamespace(counterfactuals=False)
        return [SimpleNamespace(label=label, rules=rules)] * 2

    def tell(runs: list[Any]) -> None:
        known[label] = runs

    return Job(label, plans, None, (1, 2), tell=tell)  # type: ignore[arg-type]


def test_jobs_are_kept_in_order_whoever_is_first() -> None:
    known: dict[str, Any] = {}
    jobs = [job("a", known), job("b", known), job("c", known, needs="b"), job("d", known)]
    crew, notes, begun = SlowFirst(last="d"), Notes(), list[str]()
    note: Callable[[Job], None] = lambda each: begun.append(each.label)  # noqa: E731
    found = list(carry_out(jobs, notes, crew, note))
    assert begun == ["a", "b", "d", "c"], "c waits for b, d does not wait for c"
    assert crew.begun == ["a12", "b12", "d12", "c12"], "keys of one plan are a piece"
    assert found == [[f"{label}1", f"{label}2"] for label in "abcd"]
    assert notes.added == ["a", "b", "c", "d"]


def test_what_is_known_is_not_made_again() -> None:
    known: dict[str, Any] = {}
    jobs = [job("a", known), job("b", known, needs="a")]
    crew, notes = SlowFirst(last="b"), Notes(a=["old1", "old2"])
    found = list(carry_out(jobs, notes, crew))
    assert found == [["old1", "old2"], ["b1", "b2"]]
    assert (crew.begun, notes.added) == (["b12"], ["b"])


def test_a_job_that_needs_what_nobody_makes_says_so() -> None:
    known: dict[str, Any] = {}
    with pytest.raises(KeyError, match="nothing"):
        list(carry_out([job("a", known, needs="nothing")], Notes(), SlowFirst(last="a")))
