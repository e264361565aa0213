"""Hosts in several processes: the same bits, also if a worker dies."""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from esper.api.training import resume_ppo, train_ppo
from esper.leyline import ConfigError, EsperError
from esper.simic.training import workers
from esper.simic.training.loop import Hooks
from esper.simic.training.shard import Shard
from esper.simic.training.workers import MAX_RESTARTS, Worker, WorkerError, worker_devices
from esper.tolaria.data.splits import DataSplits
from training_support import (
    InProcessConnection,
    load_few,
    remember_pools,
    same_run,
    tiny_config,
    tiny_run,
    tiny_spec,
    tiny_task,
)


def at_step(number: int, act) -> Hooks:
    """Call `act` in the nth step of a run."""
    steps = []

    def count(step: int) -> None:
        steps.append(step)
        if len(steps) == number:
            act()

    return Hooks(on_step=count)


def load_and_log(log: Path, folder: Path) -> DataSplits:
    """Loading leaves a line in a file, in whatever process."""
    with log.open("a") as file:
        file.write("loaded\n")
    return load_few(folder)


def test_processes_change_nothing_even_if_one_is_killed(tmp_path, monkeypatch, caplog):
    """The data is loaded once for all of them."""
    pools, config = remember_pools(monkeypatch), tiny_config(rounds=1)

    def kill() -> None:
        os.kill(pools[0].workers[1].connection.process.pid, signal.SIGKILL)

    for count, hooks in ((1, None), (2, at_step(3, kill))):
        log = tmp_path / f"loaded-{count}"
        task = replace(tiny_task(), load=partial(load_and_log, log))
        train_ppo(config, tmp_path / str(count), task=task, workers=count, hooks=hooks)
        assert log.read_text() == "loaded\n"
    (pool,) = pools
    assert len(pool.workers) == 2
    assert "died (exit code -9); its round is replayed" in caplog.text
    assert not any(worker.connection.process.is_alive() for worker in pool.workers)
    same_run(tmp_path / "1", tmp_path / "2")


@pytest.mark.parametrize(
    "flags", [{"population": "looped"}, {"population": "fused"}, {"network.kind": "set"}]
)
def test_workers_change_nothing_even_if_one_is_lost(tmp_path, monkeypatch, caplog, flags):
    monkeypatch.setattr(workers, "ProcessConnection", InProcessConnection)
    pools = remember_pools(monkeypatch)

    def lose() -> None:
        pools[0].workers[1].connection.lost = True

    tiny_run(tmp_path / "one", rounds=2, **flags)
    tiny_run(tmp_path / "two", rounds=2, workers=2, hooks=at_step(11, lose), **flags)
    assert caplog.text.count("its round is replayed") == 1
    same_run(tmp_path / "one", tmp_path / "two")


def test_one_worker_per_device_and_on_cpus_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "ProcessConnection", InProcessConnection)
    pools = remember_pools(monkeypatch)
    tiny_run(tmp_path / "one", rounds=1)
    tiny_run(tmp_path / "two", rounds=1, devices=["cpu", "cpu"])
    assert [pool.num_envs for pool in pools] == [4]
    assert [worker.spec.envs for worker in pools[0].workers] == [(0, 1), (2, 3)]
    same_run(tmp_path / "one", tmp_path / "two")
    # Devices are not a setting of the run.
    resume_ppo(tmp_path / "one", task=tiny_task(), rounds=2, devices=["cpu", "cpu"])
    resume_ppo(tmp_path / "two", task=tiny_task(), rounds=2)
    same_run(tmp_path / "one", tmp_path / "two")


def test_devices_are_those_that_torch_finds(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert worker_devices(None, ["cuda:1", "cuda:0", "cpu"]) == ("cuda:1", "cuda:0", "cpu")
    with pytest.raises(ConfigError, match="no device 'cuda:7'; torch finds cpu, cuda:0, cuda:1"):
        worker_devices(None, ["cuda:0", "cuda:7"])


def test_workers_are_on_the_cpu_and_some_number_of_them():
    assert worker_devices(None, None) == ("cpu",)
    assert worker_devices(3, None) == ("cpu", "cpu", "cpu")
    assert worker_devices("auto", None) == ("cpu",) * len(os.sched_getaffinity(0))
    for count, devices in ((0, None), (None, []), (2, ["cpu", "cpu"])):
        with pytest.raises(ConfigError):
            worker_devices(count, devices)


# --- failures ------------------------------------------------------------------------------------

SPEC = tiny_spec(tiny_config(), (0, 1))


def divide_by_zero(self, round_):
    return 1 / 0


def refuse(self, round_):
    raise EsperError("the data is not there")


@pytest.mark.parametrize(
    ("reset", "error", "message"),
    [
        (divide_by_zero, WorkerError, "ZeroDivisionError"),
        (refuse, EsperError, r"^the data is not there$"),
    ],
)
def test_a_defect_comes_with_its_traceback_and_bad_input_with_its_sentence(
    monkeypatch, reset, error, message
):
    monkeypatch.setattr(Shard, "reset", reset)
    worker = Worker(SPEC, InProcessConnection)
    worker.begin("reset", (0, True))
    with pytest.raises(error, match=message):
        worker.result()


def test_a_worker_that_dies_again_and_again_is_given_up(caplog):
    started = []

    def connect(spec):
        started.append(InProcessConnection(spec))
        started[-1].lost = True
        return started[-1]

    worker = Worker(SPEC, connect)
    worker.begin("reset", (0, True))
    with pytest.raises(WorkerError, match=r"environments \[0, 1\] died .*lost by the test"):
        worker.result()
    assert len(started) == 1 + MAX_RESTARTS
    assert caplog.text.count("its round is replayed") == MAX_RESTARTS
