"""Save and restore one growing network and its optimiser exactly."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.devices import to_host
from esper.growth.grown_module import GrownModule
from esper.growth.optimizer import forget, sync_slot_group, with_inner
from esper.growth.outputs import map_tensors, tensors_in
from esper.leyline import ConfigError, SeedStage
from esper.leyline.files import (
    DamagedCheckpointError,
    from_json,
    read_sealed,
    to_json,
    write_sealed,
)
from esper.leyline.growth_settings import Snapshots

# What is kept of the optimizer's state: all; all, but Adam's moments rounded; nothing.
Moments = Literal["exact", "half", "none"]
ROUNDED, HALF = ("exp_avg", "exp_avg_sq"), torch.bfloat16

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


@dataclass(frozen=True)
class SeedSnapshot:
    blueprint: int
    blend: int
    stage: SeedStage
    alpha: float
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class HostSnapshot:
    """Copies. `optimizer_states` are those of the optimiser and any inside it, or empty; `scaler`
    is that of the GradScaler if there is one."""

    tensors: dict[str, Tensor]
    seeds: dict[int, SeedSnapshot]
    optimizer_states: list[dict[Any, Any]]
    scaler: dict[str, Any] = field(default_factory=dict)

    def all_tensors(self) -> list[Tensor]:
        state = list(tensors_in(self.optimizer_states))
        seeds = [tensor for seed in self.seeds.values() for tensor in seed.tensors.values()]
        return [*self.tensors.values(), *seeds, *state]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "HostSnapshot":
        """The same with other tensors, in the order of `all_tensors`."""
        return replace(
            self,
            tensors=map_tensors(function, self.tensors),
            seeds={
                index: replace(seed, tensors=map_tensors(function, seed.tensors))
                for index, seed in self.seeds.items()
            },
            optimizer_states=map_tensors(function, self.optimizer_states),
        )

    def copied(self, copy: Callable[[Sequence[Tensor]], list[Tensor]]) -> "HostSnapshot":
        """The same with copies of all tensors."""
        copies = iter(copy(self.all_tensors()))
        return self.mapped(lambda _: next(copies))

    def with_weights_of(self, other: "HostSnapshot") -> "HostSnapshot":
        """The same, sharing the copies of `other`, which was taken of the same weights and may
        hold more seeds."""
        seeds = {
            index: replace(seed, tensors={n: other.seeds[index].tensors[n] for n in seed.tensors})
            for index, seed in self.seeds.items()
        }
        return replace(self, tensors=other.tensors, seeds=seeds)


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, including non-persistent ones."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def host_tensors(network: GrownModule) -> dict[str, Tensor]:
    """Those of the host, with the names that they had before it grew."""
    with network.ungrown():
        found = _named_tensors(network.host)
    return found if network.stacks is None else {**found, **network.stacks.spare_tensors()}


def _copies(
    tensors: Sequence[Tensor], kept: Snapshots, spare: Iterable[Tensor], halved: set[int]
) -> list[Tensor]:
    """Written into `spare` tensors where those are alike and on the same device; those with an id
    in `halved` are rounded."""
    free: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in spare:
        free.setdefault(_kind(tensor, tensor.dtype), []).append(tensor)
    types = [HALF if id(tensor) in halved else tensor.dtype for tensor in tensors]
    kinds = [free.get(_kind(*each)) for each in zip(tensors, types, strict=True)]
    into = [alike.pop() if alike else None for alike in kinds]
    pairs = list(zip(tensors, into, strict=True))
    others = [
        tensor.detach().to(dtype)
        for (tensor, own), dtype in zip(pairs, types, strict=True)
        if own is None
    ]
    new = iter([tensor.clone() for tensor in others] if kept == "device" else to_host(others))
    reused = [tensor.detach() for tensor, own in pairs if own is not None]
    if reused:
        torch._foreach_copy_([own for own in into if own is not None], reused)
    return [next(new) if own is None else own for own in into]


def _kind(tensor: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), dtype, tensor.device


def _moments_of_adam(states: list[dict[Any, Any]]) -> set[int]:
    """Their ids."""
    found = [each for state in states for each in state.values() if isinstance(each, dict)]
    return {id(each[name]) for each in found for name in ROUNDED if name in each}


def take_snapshot(
    network: GrownModule,
    optimizer: Optimizer | None,
    kept: Snapshots = "host",
    same_weights: HostSnapshot | None = None,
    spare: Iterable[Tensor] = (),
    *,
    half: bool = False,
) -> HostSnapshot:
    """Copies on the network's device (`device`), else in CPU memory, after one transfer. Weights
    are not copied again if `same_weights` is given, a snapshot since which nothing was trained.
    `spare` tensors, of snapshots that nobody needs any more, are written to. With `half` the
    moments of Adam are rounded."""
    optimizers = [] if optimizer is None else with_inner(optimizer)
    live = HostSnapshot(
        tensors=host_tensors(network),
        seeds={
            index: SeedSnapshot(
                slot.blueprint,
                slot.blend,
                slot.stage,
                slot.alpha,
                _named_tensors(slot),
            )
            for index, slot in network.each_slot()
            if slot.seed is not None
        },
        optimizer_states=[each.state_dict()["state"] for each in optimizers],
    )
    halved = _moments_of_adam(live.optimizer_states) if half else set[int]()
    copy = partial(_copies, kept=kept, spare=spare, halved=halved)
    if same_weights is None:
        return live.copied(copy)
    moments = HostSnapshot({}, {}, live.optimizer_states).copied(copy)
    return replace(live.with_weights_of(same_weights), optimizer_states=moments.optimizer_states)


@torch.no_grad()
def restore_snapshot(
    network: GrownModule, optimizer: Optimizer | None, snapshot: HostSnapshot
) -> None:
    """Restore structure, weights and optimiser state; learning rates stay as they are now. The
    optimiser is reset if the snapshot does not have its state."""
    for index, slot in network.each_slot():
        network.remove(index)
        if index in snapshot.seeds:
            seed = snapshot.seeds[index]
            network.germinate(index, seed.blueprint, seed.blend, key=0)
            network.set_blend(index, seed.stage, seed.alpha)
            _load(_named_tensors(slot), seed.tensors)
        if optimizer is not None:
            sync_slot_group(
                optimizer,
                slot.site.slot_id,
                network.seed_parameters(index),
                network.counterparts(index),
            )
    _load(host_tensors(network), snapshot.tensors)
    if optimizer is None:
        return
    if snapshot.optimizer_states:
        _restore_optimizer(optimizer, snapshot.optimizer_states)
    else:
        forget(optimizer)


def _restore_optimizer(optimizer: Optimizer, states: list[dict[Any, Any]]) -> None:
    optimizers = with_inner(optimizer)
    groups = [each.param_groups for each in optimizers]
    for each, state in zip(optimizers, states, strict=True):
        # Copies, because training changes the loaded tensors.
        each.load_state_dict({**each.state_dict(), "state": map_tensors(Tensor.clone, state)})
    for each, own in zip(optimizers, groups, strict=True):
        # Loading replaces the groups by equal ones; the old ones may be shared between optimisers.
        each.param_groups = own
    optimizer.zero_grad(set_to_none=True)


def snapshot_tree(snapshot: HostSnapshot) -> dict[str, Any]:
    """A snapshot as dictionaries of tensors and plain values."""
    seeds = {
        index: {**vars(seed), "stage": seed.stage.name} for index, seed in snapshot.seeds.items()
    }
    return {**vars(snapshot), "seeds": seeds}


def snapshot_from_tree(tree: dict[str, Any]) -> HostSnapshot:
    seeds = {
        int(index): SeedSnapshot(**{**seed, "stage": SeedStage[seed["stage"]]})
        for index, seed in tree["seeds"].items()
    }
    return HostSnapshot(**{**tree, "seeds": seeds})


def check_fits(network: GrownModule, snapshot: HostSnapshot) -> None:
    """Raises ConfigError, naming the first difference, if the snapshot is of another network."""
    shapes = {name: tuple(tensor.shape) for name, tensor in snapshot.tensors.items()}
    for name, tensor in host_tensors(network).items():
        if shapes.pop(name, None) != tuple(tensor.shape):
            raise ConfigError(
                f"the saved state does not fit this model: {name} is {tuple(tensor.shape)} here; "
                "make the model as it was before it grew"
            )
    if shapes:
        raise ConfigError(f"the saved state is of a model that also has {next(iter(shapes))}")


def _load(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
