"""Devices, and the random generators of each."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.outputs import map_tensors
from esper.leyline import ConfigError

CPU = torch.device("cpu")
# Data stays on a device if it takes at most this share of the free memory,
DATA_SHARE = 0.25
# or so many bytes if the device does not report its memory.
DATA_BYTES = 2**30


def available_devices() -> list[str]:
    """The names of the devices that torch finds in this machine."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ["cpu"]
    return ["cpu", *(f"{kind.type}:{index}" for index in range(torch.accelerator.device_count()))]


def find_device(name: str | None) -> torch.device:
    """The device of that name. None is the CPU; `auto` is the accelerator, if there is one. Raises
    ConfigError for a device that does not exist."""
    if name is None:
        return CPU
    known = available_devices()
    if name == "auto":
        return torch.device(known[min(1, len(known) - 1)])
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or f"{device.type}:{device.index or 0}" not in ["cpu:0", *known]:
        raise ConfigError(f"no device {name!r}; torch finds {', '.join(known)} here")
    return device


def devices_of(*modules: nn.Module) -> list[torch.device]:
    """Where parameters and buffers are, each device once, that of the first parameter first."""
    tensors = chain(*(chain(m.parameters(), m.buffers()) for m in modules))
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def input_device(module: nn.Module) -> torch.device:
    """Where a network expects its input: with its first parameter."""
    return next(iter(devices_of(module)), CPU)


@cache
def wide_dtype(kind: str) -> torch.dtype:
    """The most exact type of numbers that this kind of device has: float64, but not on MPS."""
    try:
        torch.zeros((), dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def on_device(value: Any, device: torch.device) -> Any:
    """`value` with all tensors in it on the device. A GPU does not wait for the copies."""
    if device.type == "cpu":
        return value
    return map_tensors(lambda tensor: _moved(tensor, device), value)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # A copy is asynchronous only from pinned memory. MPS shares its memory with the CPU.
    if tensor.device.type != "cpu" or device.type in ("mps", "meta"):
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


def has_room(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Whether data takes a small part of the device's free memory."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    info = getattr(torch.get_device_module(device), "mem_get_info", None)
    return size <= (DATA_BYTES if info is None else DATA_SHARE * info(device)[0])


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in CPU memory, with one transfer from each device."""
    copies = [each.detach().clone() if each.device.type == "cpu" else None for each in tensors]
    for device in {each.device for each in tensors} - {CPU}:
        # The largest numbers first: then every part begins at a multiple of its numbers' size.
        order = [i for i, each in enumerate(tensors) if each.device == device]
        order.sort(key=lambda i: -tensors[i].element_size())
        parts = [tensors[i].detach().contiguous().view(-1).view(torch.uint8) for i in order]
        host = torch.cat(parts).cpu().split([len(part) for part in parts])
        for i, values in zip(order, host, strict=True):
            copies[i] = _like(values.view(tensors[i].dtype), tensors[i])
    return [copy for copy in copies if copy is not None]


def _like(values: Tensor, like: Tensor) -> Tensor:
    """Flat values in the shape and memory layout of a tensor."""
    if like.is_contiguous():
        return values.view(like.shape)
    return torch.empty_like(like, device=CPU).copy_(values.view(like.shape))


States = dict[str, Tensor]


def generator_states(devices: Iterable[torch.device] = ()) -> States:
    """The state of the generator of each device, by name; always of the CPU's, too."""
    states = {"cpu": torch.get_rng_state()}
    for device in _accelerators(devices):
        module = torch.get_device_module(device)
        # Apple's MPS is one device.
        states[str(device)] = module.get_rng_state(*_argument(device))
    return states


def set_generator_states(states: States) -> None:
    for name, state in states.items():
        device = torch.device(name)
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, *_argument(device))


@contextmanager
def keeping_generators(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Afterwards the generators of the CPU and of `devices` continue as if nothing had been drawn
    inside."""
    before = generator_states(devices)
    try:
        yield
    finally:
        set_generator_states(before)


@contextmanager
def keyed(key: int, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Inside, the generators of the CPU and of `devices` start from `key`; their state is restored
    afterwards."""
    devices = _accelerators(devices)
    with keeping_generators(devices):
        torch.default_generator.manual_seed(key)
        set_generator_states(
            {str(each): torch.Generator(each).manual_seed(key).get_state() for each in devices}
        )
        yield


def _accelerators(devices: Iterable[torch.device]) -> list[torch.device]:
    return [each for each in dict.fromkeys(devices) if each.type not in ("cpu", "meta")]


def _argument(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)
