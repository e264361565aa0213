"""Devices on a machine that has only a CPU; tests/test_device.py has those on an accelerator."""

from pathlib import Path

import pytest
import torch

from command_support import esper_here
from esper.growth import devices
from esper.growth.devices import (
    available_devices,
    find_device,
    has_room,
    keeping_generators,
    keyed,
    to_host,
)
from esper.leyline import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _only_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)


@pytest.mark.parametrize("name", [None, "auto", "cpu", "cpu:0"])
def test_without_an_accelerator_the_device_is_the_cpu(name: str | None):
    assert find_device(name).type == "cpu"
    assert available_devices() == ["cpu"]


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "meta", "gpu", "", "cpu:1"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str):
    with pytest.raises(ConfigError, match="torch finds cpu"):
        find_device(name)


@pytest.mark.parametrize("command", ["grow", "evaluate", "train ppo"])
def test_commands_refuse_it_and_leave_no_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    words = (*command.split(), "--device", "cuda:7", "--out", "run")
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 2
    assert "cuda:7" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_copies_in_cpu_memory_share_nothing_with_the_originals():
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2).T]
    copies = to_host(tensors)
    tensors[0].add_(1.0)
    assert [copy.stride() for copy in copies] == [tensor.stride() for tensor in tensors]
    assert float(copies[0].sum()) == 0.0


def test_generators_of_devices_that_are_not_in_use_are_not_touched(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(device: torch.device) -> None:
        raise AssertionError(f"{device} was touched")

    monkeypatch.setattr(devices.torch, "get_device_module", refuse)
    before = torch.get_rng_state()
    with keyed(7, [CPU]), keeping_generators([CPU]):
        first = torch.randn(3)
    assert torch.equal(torch.get_rng_state(), before)
    with keyed(7):
        assert torch.equal(first, torch.randn(3))


def test_data_may_take_a_part_of_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch):
    class Module:
        @staticmethod
        def mem_get_info(device: torch.device) -> tuple[int, int]:
            return 4000, 8000

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert has_room([torch.zeros(125), torch.zeros(125)], torch.device("cuda"))
    assert not has_room([torch.zeros(126), torch.zeros(125)], torch.device("cuda"))
    # A device that does not report its memory.
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    assert has_room([torch.zeros(1000)], torch.device("mps"))
