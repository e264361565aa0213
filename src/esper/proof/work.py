"""The work of an evaluation: networks under labels, in pieces that can be made anywhere."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from esper.growth.snapshot import HostSnapshot
from esper.leyline import EpisodeOutcome, History
from esper.leyline.growth_settings import Topology
from esper.proof.arms import Plan, train
from esper.tamiyo.situation import GivesReasons
from esper.tolaria.data.splits import DataSplits


@dataclass(frozen=True)
class Run:
    """A network that was trained, now or before the evaluation went on. `model` is None where
    nobody is going to test it."""

    outcome: EpisodeOutcome
    topology: Topology
    cpu_seconds: float
    model: nn.Module | None


# --- pieces --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Networks of one plan, trained side by side: rounding may depend on which are.

    keep    the networks are wanted too
    listen  so is what happened, where a controller gives reasons
    """

    plan: Plan
    data: DataSplits
    keys: tuple[int, ...]
    attribute: bool
    keep: bool
    listen: bool


@dataclass(frozen=True)
class Made:
    """What came of a piece, by its keys; snapshots and what was heard only if they are wanted."""

    runs: dict[int, Run]
    snapshots: dict[int, HostSnapshot]
    heard: dict[int, History]


def make(piece: Piece) -> Made:
    """Ctrl-C raises KeyboardInterrupt."""
    keep, keys = piece.keep, piece.keys
    told = History() if piece.listen and isinstance(piece.plan.controller, GivesReasons) else None
    trained = train(piece.plan, piece.data, keys, told, attribute=piece.attribute)
    runs = [
        Run(each.outcome, each.topology, each.cpu_seconds, each.model if keep else None)
        for each in trained
    ]
    snapshots = [each.snapshot for each in trained]
    return Made(
        dict(zip(keys, runs, strict=True)),
        dict(zip(keys, snapshots, strict=True)) if keep else {},
        {} if told is None else {key: told.of(env) for env, key in enumerate(keys)},
    )


class Crew(Protocol):
    """Who makes pieces: `room` of them can be under way."""

    @property
    def room(self) -> int: ...

    def begin(self, piece: Piece) -> "Future[Made]": ...


class Alone:
    """Makes each piece here and now."""

    room = 1

    def begin(self, piece: Piece) -> "Future[Made]":
        future: Future[Made] = Future()
        future.set_result(make(piece))
        return future


# --- jobs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Networks under one label, one for each of `keys`.

    plans      one for each key; raises KeyError as long as a run that it depends on is not there
    attribute  what seeds are worth is found out, where they were measured
    keep       the networks are kept
    tell       hears the runs as soon as they are there
    """

    label: str
    plans: Callable[[], Sequence[Plan]]
    data: DataSplits
    keys: Sequence[int]
    attribute: bool = False
    keep: bool = False
    tell: Callable[[list[Run]], None] = lambda runs: None

    def pieces(self, plans: Sequence[Plan], listen: bool) -> Iterator[Piece]:
        """Keys with the same plan side by side."""
        attribute = self.attribute and plans[0].rules.counterfactuals
        seen: set[int] = set()
        for key, plan in zip(self.keys, plans, strict=True):
            if key not in seen:
                own = tuple(k for k, its in zip(self.keys, plans, strict=True) if its == plan)
                seen.update(own)
                yield Piece(plan, self.data, own, attribute, self.keep, listen and self.keep)


class Keeper(Protocol):
    """Who remembers runs."""

    listens: bool

    def read(self, job: Job, plans: Sequence[Plan]) -> list[Run] | None:
        """Those of a job, None unless all of them are there."""

    def add(self, job: Job, made: Sequence[Made]) -> None:
        """Keep what came of a job."""


@dataclass
class _UnderWay:
    """`read` are runs that were there already."""

    pieces: "list[Future[Made]]"
    read: list[Run] | None

    def left(self) -> "list[Future[Made]]":
        return [piece for piece in self.pieces if not piece.done()]


def carry_out(
    jobs: Sequence[Job],
    keeper: Keeper,
    crew: Crew,
    begun: Callable[[Job], None] = lambda job: None,
) -> Iterator[list[Run]]:
    """The runs of each job, in order, once they are kept; whoever makes them, and whoever is first.

    A job is begun when there is room for it and what it depends on is there, earlier ones first.
    """
    waiting, under_way = dict(enumerate(jobs)), dict[int, _UnderWay]()
    done: dict[int, tuple[list[Run], list[Made]]] = {}
    for turn, job in enumerate(jobs):
        while turn not in done:
            for number in list(waiting):
                if sum(len(each.pieces) for each in under_way.values()) >= crew.room:
                    break
                started = _start(waiting[number], keeper, crew, begun)
                if started is not None:
                    under_way[number] = started
                    del waiting[number]
            if not under_way:
                job.plans()  # It says what is missing.
            wait([f for each in under_way.values() for f in each.left()], None, FIRST_COMPLETED)
            for number in [n for n, each in under_way.items() if not each.left()]:
                ended = under_way.pop(number)
                made = [piece.result() for piece in ended.pieces]
                by_key = {key: run for each in made for key, run in each.runs.items()}
                runs = ended.read or [by_key[key] for key in jobs[number].keys]
                jobs[number].tell(runs)
                done[number] = runs, made
        runs, made = done.pop(turn)
        if made:
            keeper.add(job, made)
        yield runs


def _start(job: Job, keeper: Keeper, crew: Crew, begun: Callable[[Job], None]) -> _UnderWay | None:
    """None if it depends on what is not there yet."""
    try:
        plans = job.plans()
    except KeyError:
        return None
    begun(job)
    read = keeper.read(job, plans)
    if read is not None:
        return _UnderWay([], read)
    return _UnderWay([crew.begin(piece) for piece in job.pieces(plans, keeper.listens)], None)
