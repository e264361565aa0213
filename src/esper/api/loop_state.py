"""The state of a training loop for checkpoints: hosts, controller, optimizer, random generators."""

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from esper.growth.generators import generator_states, set_generator_states
from esper.growth.optimizer import group_settings
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.saved_state import cycle_state, load_cycle_state


def loop_state(env: GrowthCycle, controller: Controller, optimizer: Optimizer) -> dict[str, Any]:
    """Tensors and plain values; the optimizer's own state is saved with the hosts."""
    save = getattr(controller, "state_dict", None)
    return {
        "cycle": cycle_state(env),
        "controller": None if save is None else save(),
        "groups": group_settings(optimizer),
    }


def load_loop_state(
    env: GrowthCycle, controller: Controller, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Raises ConfigError, and changes nothing, if the state is of other hosts."""
    load_cycle_state(env, state["cycle"])
    if state["controller"] is not None:
        controller.load_state_dict(state["controller"])  # type: ignore[attr-defined]
    for group, settings in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(settings)


def randomness(loaders: Iterable[Any], devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The state of the generators of Python, NumPy, torch (of the CPU and `devices`) and the
    loaders."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002 - user code may use it
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
        "torch": generator_states(devices),
        "loaders": [generator.get_state() for generator in _generators(loaders)],
    }


def restore_randomness(loaders: Iterable[Any], state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    set_generator_states(state["torch"])
    for generator, own in zip(_generators(loaders), state["loaders"], strict=True):
        generator.set_state(own)


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators of loaders and of their samplers, each once."""
    found: list[torch.Generator] = []
    for loader in loaders:
        for owner in _owners(loader):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is g for g in found):
                found.append(generator)
    return found


def _owners(loader: Any) -> Iterator[Any]:
    yield loader
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(loader, name, None)
        if sampler is not None:
            yield from _owners(sampler)
