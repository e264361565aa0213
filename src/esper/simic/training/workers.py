"""All growth environments of a run as one: in this process, or spread over others.

Workers have one torch thread each, and are restarted and replayed if they die. A worker is reached
by a `Line`: here one to a process of this machine; a `Cluster` has lines to other machines.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

import numpy as np
import torch

from esper.leyline import ActionMasks, ConfigError, EsperError, History
from esper.simic.agent.rollout import VectorEnv
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import ShardSpec, groups_of
from esper.simic.training.round_log import Clock, RoundLog
from esper.simic.training.shard import Shard, joined_masks
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.families.base import Family
from esper.tolaria.tasks.base import Task

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3


class WorkerError(EsperError, RuntimeError):
    """A worker process failed in a way that starting it again does not mend."""


def known_devices() -> list[str]:
    """The names of the devices that torch finds in this machine."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ["cpu"]
    return ["cpu", *(f"{kind.type}:{index}" for index in range(torch.accelerator.device_count()))]


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_devices(
    workers: int | Literal["auto"] | None, devices: Sequence[str] | None
) -> tuple[str, ...]:
    """The device of each worker: as many CPUs as `workers` ("auto": one for each core that this
    process may use), or else `devices`; by default one CPU.

    Raises ConfigError if both are given, and for devices that are not there.
    """
    if devices is None:
        if workers == "auto":
            workers = _cores()
        if workers is not None and workers < 1:
            raise ConfigError(f"there must be at least one worker, got {workers}")
        return ("cpu",) * (workers or 1)
    if workers is not None:
        raise ConfigError("each of the devices has a worker of its own; leave out workers")
    if not devices:
        raise ConfigError("the list of devices is empty; name one, such as cpu, or leave it out")
    known = known_devices()
    for name in devices:
        if name not in known:
            raise ConfigError(f"no device {name!r}; torch finds {', '.join(known)} here")
    return tuple(devices)


@dataclass(frozen=True)
class Answer:
    """What a call gave, what happened during it, and how long its rewards and observations took."""

    values: tuple[Any, ...]
    told: History
    reward_seconds: float


Reply = tuple[Literal["done", "refused", "failed"], Any]


class ShardServer:
    """A shard where it lives: whatever it is asked, it answers, also if it cannot go on."""

    def __init__(self, spec: ShardSpec) -> None:
        torch.set_num_threads(1)
        self.spec, self.log = spec, RoundLog()
        self.shard: Shard | None = None

    def answer(self, name: str, argument: Any) -> Reply:
        """ "done" with an `Answer`, "refused" with a sentence, or "failed" with a traceback."""
        try:
            return "done", self._call(name, argument)
        except EsperError as error:
            return "refused", str(error)
        except Exception:  # noqa: BLE001 (whoever asked raises it again)
            return "failed", traceback.format_exc()

    def _call(self, name: str, argument: Any) -> Answer:
        log = self.log
        log.clear()
        log.clock = Clock()
        if self.shard is None:
            self.shard = Shard(self.spec, log)
        values = getattr(self.shard, name)(argument)
        told = History((), list(log.rows), list(log.events), list(log.outcomes))
        return Answer(values, told, log.clock.seconds["reward"])


class LostError(Exception):
    """A worker is gone; says how, as far as anybody knows."""


class Line(Protocol):
    """To a shard that is served somewhere else: whatever is sent gets one reply, in order."""

    def send(self, name: str, argument: Any) -> None:
        """Nothing is raised if the worker is gone."""

    def receive(self) -> Reply:
        """Raises LostError if the worker is gone."""

    def close(self) -> None:
        """Ends the worker."""


Connect = Callable[[ShardSpec], Line]


class Cluster(Protocol):
    """Machines that workers can be on."""

    @property
    def cpus(self) -> int: ...

    def lines(self, count: int) -> Connect:
        """To start `count` workers with."""


class ProcessLine:
    """A line to a process of its own on this machine."""

    def __init__(self, spec: ShardSpec) -> None:
        # Spawned: a fork would inherit torch's threads and every open file.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(spec, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, name: str, argument: Any) -> None:
        # A closed pipe is found when the reply is due.
        with contextlib.suppress(OSError):
            self.pipe.send((name, argument))

    def receive(self) -> Reply:
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise LostError(f"exit code {self.process.exitcode}") from error

    def close(self) -> None:
        self.pipe.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.terminate()


def _serve(spec: ShardSpec, pipe: Connection) -> None:
    """The life of a process: answer until the pipe closes."""
    # Ctrl-C reaches the whole group; the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = ShardServer(spec)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(server.answer(*pipe.recv()))


@contextlib.contextmanager
def growth_environments(
    config: TrainingConfig,
    task: Task,
    data: DataSplits,
    log: RoundLog,
    devices: Sequence[str] = ("cpu",),
    family: Family | None = None,
    cluster: Cluster | None = None,
) -> Iterator[VectorEnv]:
    """`config.envs` growth environments, with one worker for each of `devices`: a process of its
    own, which needs `data` that is shared, or this one if there is only one; or wherever the
    `cluster` puts it. `log` is told what happens, in the same order for any number of workers, of
    which each has whole groups."""
    groups = np.arange(config.envs).reshape(-1, config.group)
    parts = np.array_split(groups, min(len(devices), len(groups)))
    specs = [
        ShardSpec(config, task, data, tuple(part.flatten().tolist()), device, family)
        for part, device in zip(parts, devices, strict=False)
    ]
    if cluster is None and len(specs) == 1:
        yield Shard(specs[0], log)
        return
    connect = ProcessLine if cluster is None else cluster.lines(len(specs))
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(Worker(spec, connect))) for spec in specs]
        yield Workers(workers, log)


class Workers:
    """A `VectorEnv` of the environments of several workers, in the order of their numbers."""

    def __init__(self, workers: "Sequence[Worker]", log: RoundLog) -> None:
        self.workers, self.log = workers, log
        ends = np.cumsum([len(worker.spec.envs) for worker in workers])
        self.num_envs, self.cuts = int(ends[-1]), ends[:-1]
        self.groups = np.concatenate([groups_of(worker.spec) for worker in workers])

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        observations, masks = self._all("reset", [round_] * len(self.workers))
        return observations, masks

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]:
        observations, masks, *arrays = self._all("step", np.split(actions, self.cuts))
        rewards, terminated, truncated = arrays
        return observations, masks, rewards, terminated, truncated

    def _all(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        for worker, argument in zip(self.workers, arguments, strict=True):
            worker.begin(name, argument)
        answers = [worker.result() for worker in self.workers]
        self.log.clock.move(max(answer.reward_seconds for answer in answers), "hosts", "reward")
        with self.log.clock.phase("telemetry"):
            for answer in answers:
                self._tell(answer.told)
        return [_joined(parts) for parts in zip(*(a.values for a in answers), strict=True)]

    def _tell(self, told: History) -> None:
        for row in told.rows:
            self.log.metrics(row)
        for event in told.events:
            self.log.event(event)
        for outcome in told.outcomes:
            self.log.outcome(outcome)


def _joined(parts: tuple[Any, ...]) -> Any:
    """Arrays, or masks, of one worker after the other."""
    return joined_masks(parts) if isinstance(parts[0], ActionMasks) else np.concatenate(parts)


class Worker:
    """A shard somewhere else: `begin` something, then wait for its `result`.

    It remembers what the round was made of. A worker that dies is replaced by one that plays
    the same round again up to the same step; since nothing in it is random, nothing is lost.
    """

    def __init__(self, spec: ShardSpec, connect: Connect = ProcessLine) -> None:
        self.spec, self.connect = spec, connect
        self.calls: list[tuple[str, Any]] = []
        self.line = connect(spec)

    def begin(self, name: str, argument: Any) -> None:
        if name == "reset":
            self.calls.clear()
        self.calls.append((name, argument.copy() if isinstance(argument, np.ndarray) else argument))
        self.line.send(*self.calls[-1])

    def result(self) -> Answer:
        last: LostError | None = None
        for _ in range(1 + MAX_RESTARTS):
            try:
                if last is not None:
                    self._replace(last)
                return self._receive()
            except LostError as error:
                last = error
        raise WorkerError(
            f"the worker of environments {list(self.spec.envs)} died {1 + MAX_RESTARTS} times in "
            f"the same step ({last}); there may be too little memory for so many environments"
        ) from last

    def _receive(self) -> Answer:
        kind, value = self.line.receive()
        if kind == "refused":
            raise EsperError(value)
        if kind == "failed":
            raise WorkerError(f"a worker failed:\n{value}")
        return value

    def _replace(self, why: LostError) -> None:
        """Another one, brought to where the old one was; the answer to the last call is due."""
        self.line.close()
        logger.warning(
            "the worker of environments %s died (%s); its round is played again",
            list(self.spec.envs),
            why,
        )
        self.line = self.connect(self.spec)
        for call in self.calls[:-1]:
            self.line.send(*call)
            self._receive()
        self.line.send(*self.calls[-1])

    def close(self) -> None:
        self.line.close()
