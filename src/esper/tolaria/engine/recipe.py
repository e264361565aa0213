"""How hosts are made and trained."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.growth.export import export
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.nested import map_tensors
from esper.growth.sites import Layouts, SlotChoice
from esper.leyline import ConfigError, draw_key
from esper.leyline.growth_settings import Precision
from esper.tolaria.engine.batches import DataSource
from esper.tolaria.engine.objectives import Objective


@dataclass(frozen=True)
class HostRecipe:
    """How to make one host and train it. `build` runs with torch's generators seeded by the key.

    With `precision` bf16 the products of forward and backward passes are computed in bfloat16;
    parameters, optimizer and objectives stay in float32.
    `layout` and `causal` are those of `GrownModule.wrap`.
    `weights` are the state dicts of trained hosts, by key.
    """

    build: Callable[[], nn.Module]
    slots: SlotChoice
    data: DataSource
    loss: Objective
    score: Objective
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    catalogue: BlueprintCatalogue
    max_grad_norm: float | None = None
    precision: Precision = "fp32"
    layout: Layouts | None = None
    causal: bool | None = None
    weights: Mapping[int, Mapping[str, Tensor]] | None = None

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision must be fp32 or bf16, got {self.precision!r}")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm must be above 0 or None, got {self.max_grad_norm}")


def new_host(recipe: HostRecipe, key: int, device: torch.device) -> nn.Module:
    """The host of a key, with initial or given weights. Raises ConfigError if it has no trainable
    parameters, or if its weights are missing."""
    with keyed(draw_key(key, "host")):
        host = recipe.build().to(device)
    if not any(p.requires_grad for p in host.parameters()):
        raise ConfigError(f"{type(host).__name__} has no trainable parameters")
    if recipe.weights is not None:
        _load_weights(host, key, recipe.weights)
    return host


def _load_weights(host: nn.Module, key: int, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
    if key not in weights:
        known = ", ".join(str(each) for each in weights)
        raise ConfigError(f"there are no weights for the host of key {key}, only for {known}")
    try:
        host.load_state_dict(weights[key])
    except RuntimeError as error:
        raise ConfigError(
            f"the weights of key {key} do not fit {type(host).__name__}: "
            + " ".join(str(error).split("\n\t")[1:2])
        ) from error


def new_network(recipe: HostRecipe, key: int, device: torch.device) -> GrownModule:
    """The host of a key with its slots. Raises ConfigError for impossible slots."""
    host, example = new_host(recipe, key, device), on_device(recipe.data.example(), device)
    return GrownModule.wrap(
        host,
        recipe.slots,
        example,
        recipe.catalogue,
        layout=recipe.layout,
        causal=recipe.causal,
    )


def export_network(recipe: HostRecipe, network: GrownModule) -> nn.Module:
    """`network`, of this recipe, as a plain module."""
    device = next(network.parameters()).device
    return export(network, on_device(recipe.data.example(), device))


def on_device(value: Any, device: torch.device) -> Any:
    """`value` with all tensors in it on the device."""
    if device.type == "cpu":
        return value
    return map_tensors(lambda tensor: tensor.to(device), value)
