"""All growth environments of a run as one: in this process, or spread over others.

Workers have one torch thread each, and are restarted and replayed if they die.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch

from esper.leyline import ActionMasks, ConfigError, EsperError, History
from esper.simic.agent import VectorEnv
from esper.simic.training.config import TrainingConfig
from esper.simic.training.round_log import Clock, RoundLog
from esper.simic.training.scenes import ShardSpec, groups_of
from esper.simic.training.shard import Shard, joined_masks
from esper.tolaria import DataSplits, Family, Task

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
    """What a call gave, what a critic may know after it, what happened during it, and how long its
    rewards and observations took."""

    values: tuple[Any, ...]
    privileged: np.ndarray
    told: History
    reward_seconds: float


def _serve(spec: ShardSpec, pipe: Connection) -> None:
    """The life of a worker: answer until the pipe closes."""
    # Ctrl-C reaches the whole group; the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        log = RoundLog()
        shard = Shard(spec, log)
        while True:
            name, argument = pipe.recv()
            values = getattr(shard, name)(argument)
            told = History((), log.rows, log.events, log.outcomes)
            pipe.send(
                ("done", Answer(values, shard.privileged(), told, log.clock.seconds["reward"]))
            )
            log.clear()
            log.clock = Clock()
    except EOFError:
        pass
    except EsperError as error:
        pipe.send(("refused", str(error)))
    except Exception:  # noqa: BLE001 (the parent raises it again)
        pipe.send(("failed", traceback.format_exc()))


@contextlib.contextmanager
def growth_environments(
    config: TrainingConfig,
    task: Task,
    data: DataSplits,
    log: RoundLog,
    devices: Sequence[str] = ("cpu",),
    family: Family | None = None,
) -> Iterator[VectorEnv]:
    """`config.envs` growth environments, with one worker for each of `devices`: a process of its
    own, which needs `data` that is shared, or this one if there is only one. `log` is told what
    happens, in the same order for any number of workers, of which each has whole groups."""
    groups = np.arange(config.envs).reshape(-1, config.group)
    parts = np.array_split(groups, min(len(devices), len(groups)))
    specs = [
        ShardSpec(config, task, data, tuple(part.flatten().tolist()), device, family)
        for part, device in zip(parts, devices, strict=False)
    ]
    if len(specs) == 1:
        yield Shard(specs[0], log)
        return
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(Worker(spec))) for spec in specs]
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

    def privileged(self) -> np.ndarray:
        return self._privileged

    def _all(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        for worker, argument in zip(self.workers, arguments, strict=True):
            worker.begin(name, argument)
        answers = [worker.result() for worker in self.workers]
        self._privileged = np.concatenate([answer.privileged for answer in answers])
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
    """A shard in another process: `begin` something, then wait for its `result`.

    It remembers what the round was made of. A process that dies is replaced by one that plays
    the same round again up to the same step; since nothing in it is random, nothing is lost.
    """

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        self.calls: list[tuple[str, Any]] = []
        self._start()

    def _start(self) -> None:
        # Spawned: a fork would inherit torch's threads and every open file.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.spec, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, name: str, argument: Any) -> None:
        if name == "reset":
            self.calls.clear()
        self.calls.append((name, argument.copy() if isinstance(argument, np.ndarray) else argument))
        # A closed pipe is found by `result`, which starts another process.
        with contextlib.suppress(OSError):
            self.pipe.send(self.calls[-1])

    def result(self) -> Answer:
        for attempt in range(1 + MAX_RESTARTS):
            try:
                if attempt:
                    self._replace()
                return self._receive()
            except (EOFError, OSError) as error:
                last = error
        raise WorkerError(
            f"the worker of environments {list(self.spec.envs)} died {1 + MAX_RESTARTS} times in "
            "the same step; there may be too little memory for so many environments"
        ) from last

    def _receive(self) -> Answer:
        kind, value = self.pipe.recv()
        if kind == "refused":
            raise EsperError(value)
        if kind == "failed":
            raise WorkerError(f"a worker failed:\n{value}")
        return value

    def _replace(self) -> None:
        """A new process, brought to where the old one was; the answer to the last call is due."""
        self.pipe.close()
        self.process.join()
        logger.warning(
            "the worker of environments %s died (exit code %s); its round is played again",
            list(self.spec.envs),
            self.process.exitcode,
        )
        self._start()
        for call in self.calls[:-1]:
            self.pipe.send(call)
            self._receive()
        self.pipe.send(self.calls[-1])

    def close(self) -> None:
        self.pipe.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.terminate()
