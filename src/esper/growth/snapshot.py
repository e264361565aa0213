"""Save and restore one growing network and its optimiser exactly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.devices import to_host
from esper.growth.grown_module import GrownModule
from esper.growth.nested import map_tensors, tensors_in
from esper.growth.optimizer import sync_slot_group, with_inner
from esper.leyline import ConfigError, SeedStage


@dataclass(frozen=True)
class SeedSnapshot:
    blueprint: int
    blend: int
    stage: SeedStage
    alpha: float
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class HostSnapshot:
    """Copies. `optimizer_states` are those of the optimiser and any inside it, `scaler` is that of
    the GradScaler if there is one."""

    tensors: dict[str, Tensor]
    seeds: dict[int, SeedSnapshot]
    optimizer_states: list[dict[Any, Any]]
    scaler: dict[str, Any] = field(default_factory=dict)

    def all_tensors(self) -> list[Tensor]:
        state = list(tensors_in(self.optimizer_states))
        seeds = [tensor for seed in self.seeds.values() for tensor in seed.tensors.values()]
        return [*self.tensors.values(), *seeds, *state]

    def copied(self, copy: Callable[[Sequence[Tensor]], list[Tensor]]) -> "HostSnapshot":
        """The same with copies of all tensors."""
        copies = iter(copy(self.all_tensors()))

        def next_ones(value: Any) -> Any:
            return map_tensors(lambda _: next(copies), value)

        # In the order of `all_tensors`.
        tensors = next_ones(self.tensors)
        seeds = {
            i: replace(seed, tensors=next_ones(seed.tensors)) for i, seed in self.seeds.items()
        }
        return replace(
            self, tensors=tensors, seeds=seeds, optimizer_states=next_ones(self.optimizer_states)
        )


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, including non-persistent ones."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def take_snapshot(
    network: GrownModule, optimizer: Optimizer | None, kept: Literal["host", "device"] = "host"
) -> HostSnapshot:
    """Copies in CPU memory (`host`), after one transfer, or on the network's device."""
    optimizers = [] if optimizer is None else with_inner(optimizer)
    snapshot = HostSnapshot(
        tensors=_named_tensors(network.host),
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
    return snapshot.copied(to_host if kept == "host" else _clones)


@torch.no_grad()
def restore_snapshot(
    network: GrownModule, optimizer: Optimizer | None, snapshot: HostSnapshot
) -> None:
    """Restore structure, weights and optimiser state; learning rates stay as they are now."""
    for index, slot in network.each_slot():
        network.remove(index)
        if index in snapshot.seeds:
            seed = snapshot.seeds[index]
            network.germinate(index, seed.blueprint, seed.blend, key=0)
            network.set_blend(index, seed.stage, seed.alpha)
            _load(slot, seed.tensors)
        if optimizer is not None:
            sync_slot_group(optimizer, slot.site.slot_id, network.seed_parameters(index))
    _load(network.host, snapshot.tensors)
    if optimizer is not None:
        _restore_optimizer(optimizer, snapshot.optimizer_states)


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
    for name, tensor in _named_tensors(network.host).items():
        if shapes.pop(name, None) != tuple(tensor.shape):
            raise ConfigError(
                f"the saved state does not fit this model: {name} is {tuple(tensor.shape)} here; "
                "make the model as it was before it grew"
            )
    if shapes:
        raise ConfigError(f"the saved state is of a model that also has {next(iter(shapes))}")


def _load(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, tensor in _named_tensors(module).items():
        tensor.copy_(tensors[name])
