"""Tensors in nested inputs and outputs of models."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with every tensor replaced; anything that holds none stays the same object."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [map_tensors(function, entry) for entry in value]
        # A named tuple takes its fields one by one.
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {name: map_tensors(function, entry) for name, entry in vars(value).items()}
        return dataclasses.replace(value, **own)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))
