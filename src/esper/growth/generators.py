"""torch's global random generators: that of the CPU and those of the devices in use.

Generators of other devices are not touched: this would occupy memory on every GPU.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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
