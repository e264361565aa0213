"""Shards in processes of their own: one torch thread each, restarted and replayed if they die."""

import contextlib
import logging
import multiprocessing
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from esper.leyline import ConfigError, EsperError
from esper.simic.training.shard import Shard, ShardSpec, ShardStep

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


def worker_devices(workers: int | None, devices: Sequence[str] | None) -> tuple[str, ...]:
    """The device of each worker: as many CPUs as `workers`, or else `devices`; by default one CPU.

    Raises ConfigError if both are given, and for devices that are not there.
    """
    if devices is None:
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


def _serve(spec: ShardSpec, pipe: Connection) -> None:
    """The life of a worker: answer until the pipe closes."""
    # Ctrl-C reaches the whole group; the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        shard = Shard(spec)
        while True:
            name, argument = pipe.recv()
            pipe.send(("done", getattr(shard, name)(argument)))
    except EOFError:
        pass
    except EsperError as error:
        pipe.send(("refused", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


class LocalShard:
    """A shard in this process, with the manners of a `WorkerShard`."""

    def __init__(self, spec: ShardSpec) -> None:
        self.shard = Shard(spec)

    def begin(self, name: str, argument: Any) -> None:
        self.pending = getattr(self.shard, name)(argument)

    def result(self) -> ShardStep:
        return self.pending

    def close(self) -> None:
        pass


class WorkerShard:
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

    def result(self) -> ShardStep:
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

    def _receive(self) -> ShardStep:
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
