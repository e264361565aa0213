"""All growth environments of a run as one: in this process, or distributed over workers.

A worker holds one shard and one torch thread. It is restarted, and its round replayed, if it dies.
It is reached by a `Connection`: here to a process of this machine; a `Cluster` makes connections to
other machines.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Literal, Protocol

import numpy as np
import torch

from esper.growth.devices import find_device
from esper.leyline import ActionMasks, ConfigError, EsperError, History
from esper.simic.agent.rollout import Step, VectorEnv
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import ShardSpec, groups_of
from esper.simic.training.round_log import Clock, RoundLog
from esper.simic.training.shard import Shard, join_masks
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.families.base import Family
from esper.tolaria.tasks import Task

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3


class WorkerError(EsperError, RuntimeError):
    """A worker failed in a way that a restart does not repair."""


class WorkerLostError(Exception):
    """A worker is gone; the message is the reason, as far as it is known."""


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_devices(
    workers: int | Literal["auto"] | None,
    devices: Sequence[str] | None,
    device: str | None = None,
) -> tuple[str, ...]:
    """The device of each worker: `workers` times `device`, by default the CPU ("auto": one worker
    per core that this process may use), or else `devices`; by default one worker.

    Raises ConfigError if both are given, and for devices that do not exist.
    """
    if devices is None:
        if workers == "auto":
            workers = _usable_cores()
        if workers is not None and workers < 1:
            raise ConfigError(f"there must be at least one worker, got {workers}")
        return (str(find_device(device)),) * (workers or 1)
    if workers is not None:
        raise ConfigError("each of the devices has a worker of its own; leave out workers")
    if not devices:
        raise ConfigError("the list of devices is empty; name one, such as cpu, or leave it out")
    return tuple(str(find_device(name)) for name in devices)


@dataclass(frozen=True)
class CallResult:
    """What a call of a shard returned and recorded, and the seconds it spent on rewards and
    observations."""

    values: tuple[Any, ...]
    history: History
    reward_seconds: float


# "done" with a `CallResult`, "refused" with a message, or "failed" with a traceback.
Reply = tuple[Literal["done", "refused", "failed"], Any]


class ShardServer:
    """A shard in its worker: every call gets a reply, also one that fails."""

    def __init__(self, spec: ShardSpec) -> None:
        torch.set_num_threads(1)
        self.spec, self.log = spec, RoundLog()
        self.shard: Shard | None = None

    def answer(self, name: str, argument: Any) -> Reply:
        """Call the method `name` of the shard; `reset` with the round and whether its records are
        detailed."""
        try:
            return "done", self._call(name, argument)
        except EsperError as error:
            return "refused", str(error)
        except Exception:  # noqa: BLE001 (the caller raises it again)
            return "failed", traceback.format_exc()

    def _call(self, name: str, argument: Any) -> CallResult:
        log = self.log
        log.clear()
        log.clock = Clock()
        if self.shard is None:
            self.shard = Shard(self.spec, log)
        if name == "reset":
            argument, log.detailed = argument
        values = getattr(self.shard, name)(argument)
        history = History((), list(log.rows), list(log.events), list(log.outcomes))
        return CallResult(values, history, log.clock.seconds["reward"])


class Connection(Protocol):
    """To a `ShardServer` in another process: every call that is sent gets one reply, in order."""

    def send(self, name: str, argument: Any) -> None:
        """Raises nothing if the worker is gone."""

    def receive(self) -> Reply:
        """Raises WorkerLostError if the worker is gone."""

    def close(self) -> None:
        """Ends the worker."""


Connect = Callable[[ShardSpec], Connection]


class Cluster(Protocol):
    """Machines for workers."""

    @property
    def cpus(self) -> int: ...

    def connector(self, count: int) -> Connect:
        """Starts up to `count` workers, one for each call."""


class ProcessConnection:
    """A connection to a process of its own on this machine."""

    def __init__(self, spec: ShardSpec) -> None:
        # Spawned: a fork would inherit torch's threads and every open file.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(spec, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, name: str, argument: Any) -> None:
        # A closed pipe is noticed when the reply is due.
        with contextlib.suppress(OSError):
            self.pipe.send((name, argument))

    def receive(self) -> Reply:
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise WorkerLostError(f"exit code {self.process.exitcode}") from error

    def close(self) -> None:
        self.pipe.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.terminate()


def _serve(spec: ShardSpec, pipe: Pipe) -> None:
    """Main function of a worker process: answer until the pipe closes."""
    # Ctrl-C reaches the whole process group; the parent decides when to stop.
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
    """`config.envs` growth environments, with one worker for each of `devices`.

    A single worker is this process. Several are processes of their own, and need shared `data`;
    with a `cluster` they run there. Each has whole groups. `log` gets the same records in the same
    order for any number of workers.
    """
    groups = np.arange(config.envs).reshape(-1, config.group)
    divided = np.array_split(groups, min(len(devices), len(groups)))
    specs = [
        ShardSpec(config, task, data, tuple(envs.flatten().tolist()), device, family)
        for envs, device in zip(divided, devices, strict=False)
    ]
    if cluster is None and len(specs) == 1:
        yield Shard(specs[0], log)
        return
    connect = ProcessConnection if cluster is None else cluster.connector(len(specs))
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(Worker(spec, connect))) for spec in specs]
        yield WorkerPool(workers, log)


class WorkerPool:
    """A `VectorEnv` of the environments of several workers, in the order of their numbers."""

    def __init__(self, workers: "Sequence[Worker]", log: RoundLog) -> None:
        self.workers, self.log = workers, log
        ends = np.cumsum([len(worker.spec.envs) for worker in workers])
        self.num_envs, self.cuts = int(ends[-1]), ends[:-1]
        self.groups = np.concatenate([groups_of(worker.spec) for worker in workers])

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        begin = (round_, self.log.detailed)
        observations, masks = self._call("reset", [begin] * len(self.workers))
        return observations, masks

    def step(self, actions: np.ndarray) -> Step:
        observations, masks, *arrays = self._call("step", np.split(actions, self.cuts))
        rewards, terminated, truncated = arrays
        return observations, masks, rewards, terminated, truncated

    def _call(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """Call all workers at once, then join what they return."""
        for worker, argument in zip(self.workers, arguments, strict=True):
            worker.begin(name, argument)
        results = [worker.result() for worker in self.workers]
        self.log.clock.move(max(result.reward_seconds for result in results), "hosts", "reward")
        with self.log.clock.phase("telemetry"):
            for history in (result.history for result in results):
                for row in history.rows:
                    self.log.metrics(row)
                for event in history.events:
                    self.log.event(event)
                for outcome in history.outcomes:
                    self.log.outcome(outcome)
        joined: list[Any] = []
        for values in zip(*(result.values for result in results), strict=True):
            join = join_masks if isinstance(values[0], ActionMasks) else np.concatenate
            joined.append(join(values))
        return joined


class Worker:
    """A shard in another process: `begin` a call, then wait for its `result`.

    It remembers the calls of the round. A worker that dies is replaced by one that replays them;
    since nothing in a shard is random, the results are the same.
    """

    def __init__(self, spec: ShardSpec, connect: Connect = ProcessConnection) -> None:
        self.spec, self.connect = spec, connect
        self.calls: list[tuple[str, Any]] = []
        self.connection = connect(spec)

    def begin(self, name: str, argument: Any) -> None:
        if name == "reset":
            self.calls.clear()
        self.calls.append((name, argument.copy() if isinstance(argument, np.ndarray) else argument))
        self.connection.send(*self.calls[-1])

    def result(self) -> CallResult:
        last: WorkerLostError | None = None
        for _ in range(1 + MAX_RESTARTS):
            try:
                if last is not None:
                    self._replace(last)
                return self._receive()
            except WorkerLostError as error:
                last = error
        raise WorkerError(
            f"the worker of environments {list(self.spec.envs)} died {1 + MAX_RESTARTS} times in "
            f"the same step ({last}); if memory is short, use fewer environments"
        ) from last

    def _receive(self) -> CallResult:
        kind, content = self.connection.receive()
        if kind == "refused":
            raise EsperError(content)
        if kind == "failed":
            raise WorkerError(f"a worker failed:\n{content}")
        return content

    def _replace(self, reason: WorkerLostError) -> None:
        """Start another worker and replay the round up to the last call, whose reply is due."""
        self.connection.close()
        logger.warning(
            "the worker of environments %s died (%s); its round is replayed",
            list(self.spec.envs),
            reason,
        )
        self.connection = self.connect(self.spec)
        for call in self.calls[:-1]:
            self.connection.send(*call)
            self._receive()
        self.connection.send(*self.calls[-1])

    def close(self) -> None:
        self.connection.close()
