"""Hosts in several processes: the same bits, whoever dies."""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from esper.api.training import resume_ppo, train_ppo
from esper.leyline import ConfigError
from esper.simic.training.loop import Hooks
from esper.simic.training.workers import worker_devices
from esper.tolaria.data.splits import DataSplits
from training_support import (
    load_few,
    remember_workers,
    same_run,
    tiny_config,
    tiny_run,
    tiny_task,
)


@pytest.mark.parametrize("population", ["looped", "fused"])
def test_workers_change_nothing_even_if_one_is_killed(tmp_path, monkeypatch, caplog, population):
    tiny_run(tmp_path / "one", rounds=2, population=population)
    pools = remember_workers(monkeypatch)
    steps = []

    def kill(step: int) -> None:
        steps.append(step)
        if len(steps) == 11:
            os.kill(pools[0].workers[1].line.process.pid, signal.SIGKILL)

    how = {"workers": 2, "hooks": Hooks(on_step=kill)}
    tiny_run(tmp_path / "two", rounds=2, population=population, **how)
    assert len(pools[0].workers) == 2
    assert "died (exit code -9); its round is played again" in caplog.text
    assert not any(worker.line.process.is_alive() for worker in pools[0].workers)
    same_run(tmp_path / "one", tmp_path / "two")


def test_workers_change_nothing_with_a_network_over_sets(tmp_path):
    kind = {"network.kind": "set"}
    tiny_run(tmp_path / "one", rounds=2, **kind)
    tiny_run(tmp_path / "two", rounds=2, workers=2, **kind)
    same_run(tmp_path / "one", tmp_path / "two")


def test_one_worker_per_device_and_on_cpus_the_same_bits(tmp_path, monkeypatch):
    pools = remember_workers(monkeypatch)
    tiny_run(tmp_path / "one", rounds=1)
    tiny_run(tmp_path / "two", rounds=1, devices=["cpu", "cpu"])
    assert [pool.num_envs for pool in pools] == [4]
    assert [worker.spec.envs for worker in pools[0].workers] == [(0, 1), (2, 3)]
    same_run(tmp_path / "one", tmp_path / "two")
    # What devices a run is on is no part of it.
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
    with pytest.raises(ConfigError, match="at least one worker, got 0"):
        worker_devices(0, None)
    with pytest.raises(ConfigError, match="list of devices is empty"):
        worker_devices(None, [])


def test_the_data_is_loaded_once_whatever_the_number_of_workers(tmp_path):
    """Loading leaves a line in a file, in whatever process."""
    for workers in (1, 2):
        told = tmp_path / f"loaded-{workers}"
        task = replace(tiny_task(), load=partial(load_and_tell, told))
        train_ppo(tiny_config(rounds=1), tmp_path / str(workers), task=task, workers=workers)
        assert told.read_text() == "loaded\n"
    same_run(tmp_path / "1", tmp_path / "2")


def load_and_tell(told: Path, folder: Path) -> DataSplits:
    with told.open("a") as file:
        file.write("loaded\n")
    return load_few(folder)
