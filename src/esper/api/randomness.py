"""Where global generators and those of loaders stand, so that a run can be taken up from there."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch


def randomness(loaders: Iterable[Any]) -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, and of those that loaders own."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002 - the user's own code may draw from it
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "loaders": [generator.get_state() for generator in _generators(loaders)],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_randomness(loaders: Iterable[Any], state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    for generator, own in zip(_generators(loaders), state["loaders"], strict=True):
        generator.set_state(own)
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Those of the loaders and of their samplers, each once."""
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
