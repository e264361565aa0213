"""A copy of one growing network and its optimiser, and the way back to it, bit for bit."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.grown_module import GrownModule
from esper.growth.optimizer import sync_slot_group
from esper.growth.sites import map_tensors
from esper.leyline import SeedStage


@dataclass(frozen=True)
class SeedSnapshot:
    blueprint: int
    blend: int
    stage: SeedStage
    alpha: float
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class HostSnapshot:
    """Everything in CPU memory of its own; shares no storage with the network."""

    tensors: dict[str, Tensor]
    seeds: dict[int, SeedSnapshot]
    optimizer_state: dict[Any, Any]

    def all_tensors(self) -> list[Tensor]:
        state = [
            value
            for entry in self.optimizer_state.values()
            for value in entry.values()
            if isinstance(value, Tensor)
        ]
        seeds = [tensor for seed in self.seeds.values() for tensor in seed.tensors.values()]
        return [*self.tensors.values(), *seeds, *state]


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, also those a state dict leaves out."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def take_snapshot(network: GrownModule, optimizer: Optimizer) -> HostSnapshot:
    return HostSnapshot(
        tensors={name: _to_cpu(t) for name, t in _named_tensors(network.host).items()},
        seeds={
            index: SeedSnapshot(
                slot.blueprint,
                slot.blend,
                slot.stage,
                slot.alpha,
                {name: _to_cpu(t) for name, t in _named_tensors(slot).items()},
            )
            for index, slot in network.each_slot()
            if slot.seed is not None
        },
        optimizer_state=map_tensors(_to_cpu, optimizer.state_dict()["state"]),
    )


@torch.no_grad()
def restore_snapshot(network: GrownModule, optimizer: Optimizer, snapshot: HostSnapshot) -> None:
    """Bring back structure, weights and optimiser state; learning rates stay as they are now."""
    for index, slot in network.each_slot():
        network.remove(index)
        if index in snapshot.seeds:
            seed = snapshot.seeds[index]
            network.germinate(index, seed.blueprint, seed.blend, key=0)
            network.set_blend(index, seed.stage, seed.alpha)
            _load(slot, seed.tensors)
        sync_slot_group(optimizer, slot.site.slot_id, network.seed_parameters(index))
    _load(network.host, snapshot.tensors)
    state_dict = optimizer.state_dict()
    state_dict["state"] = snapshot.optimizer_state
    optimizer.load_state_dict(state_dict)
    optimizer.zero_grad(set_to_none=True)


def _load(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, tensor in _named_tensors(module).items():
        tensor.copy_(tensors[name])
