"""Several machines: train the hosts of a training run or an evaluation on a Ray cluster.

    with esper.ray.Cluster() as cluster:
        train_ppo(config, "runs/first", workers=4, cluster=cluster)

The policy stays with the caller. Results are identical to the bit to those of one machine.
"""

import logging
import os
import socket
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from esper import __version__
from esper.leyline import ConfigError, EsperError, PackageMissingError
from esper.proof.arms import WorkItem, WorkResults, train_item
from esper.simic.training.env_specs import ShardSpec
from esper.simic.training.workers import Connect, Reply, ShardServer, WorkerLostError
from esper.tolaria.data.splits import DataSplits

# Ray reads these when it is imported: send no usage statistics, give up early on absent clusters.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
try:
    import ray
except ImportError:
    raise PackageMissingError("esper.ray needs ray", "ray") from None

LOCAL, RUNNING = "local", "auto"
CONNECT_TIMEOUT = 5.0  # seconds


class Cluster:
    """The Ray cluster at `address`, such as "10.0.0.1:6379", the one that runs on this machine
    ("auto"), or one that is started here and ends with the `with` block ("local").

    Use it as a context manager. A program that is already connected to Ray keeps its connection.
    Raises ConfigError if no cluster answers.
    """

    def __init__(self, address: str = LOCAL) -> None:
        self.address = address
        self._stored: dict[int, tuple[DataSplits, Any]] = {}

    def __enter__(self) -> "Cluster":
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(self.address)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stored.clear()
        if self._ours:
            ray.shutdown()

    @property
    def cpus(self) -> int:
        """The CPUs of all nodes."""
        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def connector(self, count: int) -> Connect:
        """Starts up to `count` workers, one for each call. If there are as many free CPUs, each
        reserves one; otherwise none does, so that no worker waits. A replacement reserves none."""
        free = ray.available_resources().get("CPU", 0)
        placed: set[tuple[int, ...]] = set()

        def connect(spec: ShardSpec) -> ActorConnection:
            cpus = int(count <= free and spec.envs not in placed)
            placed.add(spec.envs)
            return ActorConnection(spec, self._reference(spec.data), cpus)

        return connect

    @property
    def capacity(self) -> int:
        """How many work items may be submitted at a time: two per CPU, so that none is idle."""
        return 2 * self.cpus

    def submit(self, item: WorkItem) -> "Future[WorkResults]":
        """Train a work item of an evaluation; if its node is lost, on another one."""
        parts = _all_but_data(item)
        task = ray.remote(_train_item).options(num_cpus=1, scheduling_strategy="SPREAD")
        return _with_own_errors(task.remote(VERSIONS, parts, self._reference(item.data)).future())

    def _reference(self, data: DataSplits) -> Any:
        """Data is stored once, and copied from there once to each node that needs it."""
        if id(data) not in self._stored:
            arrays = [getattr(data, each.name).numpy() for each in fields(DataSplits)]
            self._stored[id(data)] = data, ray.put(arrays)
        return self._stored[id(data)][1]


def _connect(address: str) -> None:
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        how["include_dashboard"] = False
        # By default Ray lowers the priority of its workers.
        how["_system_config"] = {"worker_niceness": 0}
    elif address != RUNNING:
        _check_answers(address)
    try:
        ray.init(address, **how)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise ConfigError(_no_cluster(address, _first_line(error))) from error


def _check_answers(address: str) -> None:
    """Fail within seconds; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ConfigError(
            f"{address!r} is not the address of a Ray cluster; give HOST:PORT, such as "
            "10.0.0.1:6379, or auto for the one that runs on this machine"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            _no_cluster(address, getattr(error, "strerror", None) or str(error))
        ) from error


def _no_cluster(address: str, reason: str) -> str:
    return (
        f"no Ray cluster answers at {address} ({reason}); start one with `ray start --head`, or "
        "use the address local, which starts one here"
    )


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


class ActorConnection:
    """A connection to a shard in an actor."""

    def __init__(self, spec: ShardSpec, data: Any, cpus: int) -> None:
        actor = ray.remote(_ShardActor).options(num_cpus=cpus, scheduling_strategy="SPREAD")
        self.actor = actor.remote(VERSIONS, _all_but_data(spec), data)
        self.due: deque[Any] = deque()

    def send(self, name: str, argument: Any) -> None:
        self.due.append(self.actor.answer.remote(name, argument))

    def receive(self) -> Reply:
        try:
            return ray.get(self.due.popleft())
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                return "failed", str(error)  # A replacement would fail too.
            raise WorkerLostError(_first_line(error)) from error

    def close(self) -> None:
        ray.kill(self.actor)


# --- on the nodes --------------------------------------------------------------------------------

VERSIONS = {"esper": __version__, "torch": torch.__version__, "numpy": np.__version__}


class _ShardActor:
    """A `ShardServer` as an actor of Ray."""

    def __init__(self, versions: Mapping[str, str], spec: dict[str, Any], data: Any) -> None:
        self.problem = _version_problem(versions)
        self.server = ShardServer(ShardSpec(**spec, data=_splits(data)))

    def answer(self, name: str, argument: Any) -> Reply:
        if self.problem is not None:
            return "refused", self.problem
        return self.server.answer(name, argument)


def _train_item(versions: Mapping[str, str], item: dict[str, Any], data: Any) -> WorkResults:
    problem = _version_problem(versions)
    if problem is not None:
        raise EsperError(problem)
    torch.set_num_threads(1)
    return train_item(WorkItem(**item, data=_splits(data)))


def _version_problem(versions: Mapping[str, str]) -> str | None:
    """Other versions could give other results."""
    for name, wanted in versions.items():
        if VERSIONS[name] != wanted:
            node = socket.gethostname()
            return f"node {node} has {name} {VERSIONS[name]}, not {wanted}; install the same there"
    return None


def _all_but_data(thing: ShardSpec | WorkItem) -> dict[str, Any]:
    names = (each.name for each in fields(thing) if each.name != "data")
    return {name: getattr(thing, name) for name in names}


def _splits(arrays: Sequence[np.ndarray]) -> DataSplits:
    with warnings.catch_warnings():
        # The arrays are read-only memory of the object store; nothing writes to them.
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        return DataSplits(*map(torch.from_numpy, arrays))


def _with_own_errors(future: "Future[WorkResults]") -> "Future[WorkResults]":
    """The future with the errors that would be raised on this machine."""
    own: Future[WorkResults] = Future()

    def pass_on(done: "Future[WorkResults]") -> None:
        error = done.exception()
        if error is None:
            own.set_result(done.result())
            return
        cause = getattr(error, "cause", None)
        if isinstance(cause, EsperError):
            own.set_exception(cause)
        elif isinstance(error, ray.exceptions.RayTaskError):
            own.set_exception(RuntimeError(f"a network could not be trained:\n{error}"))
        else:
            what = "the node of a network was lost several times during its training"
            own.set_exception(EsperError(f"{what} ({_first_line(error)}); continue with --resume"))

    future.add_done_callback(pass_on)
    return own
