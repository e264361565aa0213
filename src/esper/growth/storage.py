"""Trees of tensors and plain values in a sealed folder: safetensors and JSON, no pickle."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.growth.devices import to_host
from esper.growth.nested import tensors_in
from esper.leyline import ConfigError
from esper.leyline.sealed import (
    DamagedCheckpointError,
    from_json,
    read_sealed,
    to_json,
    write_sealed,
)

STATE, TENSORS = "state.json", "tensors.safetensors"
# A scheduler's milestones are a Counter.
_DICTS = {"dict": dict, "counter": Counter}


def write_tree(folder: Path, tree: Mapping[str, Any], version: int) -> None:
    """Write a tree of dicts, lists, tuples, tensors, numbers, strings and None.

    Raises ConfigError that names an entry of another type, OSError if writing fails.
    """
    tensors: dict[str, Tensor] = {}
    # One transfer from the device for all of them.
    away = [tensor for tensor in tensors_in(tree) if tensor.device.type != "cpu"]
    here = dict(zip(map(id, away), to_host(away), strict=True))

    def add(tensor: Tensor) -> str:
        return _add(here.get(id(tensor), tensor).detach().contiguous(), tensors)

    plain = _encode(tree, add, "")
    write_sealed(folder, {STATE: to_json({"tree": plain}), TENSORS: save(tensors)}, version)


def read_tree(folder: Path, version: int, within: Path | None = None) -> dict[str, Any]:
    """The tree of `write_tree`; raises ConfigError if it is damaged or of another version."""
    contents = read_sealed(folder, (STATE, TENSORS), version, within)
    try:
        plain = from_json(folder / STATE, contents[STATE])["tree"]
        tree = _decode(plain, load(contents[TENSORS]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{folder} cannot be used: {error}") from error
    if not isinstance(tree, dict):
        raise DamagedCheckpointError(f"{folder} cannot be used: it is not a dictionary")
    return tree


def _encode(value: Any, add: Callable[[Tensor], str], path: str) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        return {"tensor": add(value)}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(v, add, f"{path}.{i}") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = value.items()
        return {kind: [[_key(k, path), _encode(v, add, f"{path}.{k}")] for k, v in pairs]}
    raise ConfigError(
        f"{path.lstrip('.')} is a {type(value).__name__}, which cannot be saved; only tensors, "
        "numbers, strings, and lists, tuples and dictionaries of them can"
    )


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, str) or type(key) is int:
        return key
    raise ConfigError(f"{path.lstrip('.')} has the key {key!r}, which is not a string or integer")


def _add(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """The name of the stored tensor; equal tensors are stored once."""
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(content).hexdigest()
    name = f"{digest[:32]}-{str(tensor.dtype).removeprefix('torch.')}-{list(tensor.shape)}"
    tensors.setdefault(name, tensor)
    return name


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float(content)
    if kind == "tensor":
        # A copy, because one stored tensor may be used several times.
        return tensors[content].clone()
    if kind in ("list", "tuple"):
        entries = [_decode(entry, tensors) for entry in content]
        return tuple(entries) if kind == "tuple" else entries
    return _DICTS[kind]({key: _decode(entry, tensors) for key, entry in content})
