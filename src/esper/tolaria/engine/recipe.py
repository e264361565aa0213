"""How hosts are made and trained."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.growth.devices import devices_of, keyed
from esper.growth.export import export
from esper.growth.grown_module import GrownModule
from esper.growth.outputs import map_tensors, tensors_in
from esper.growth.sites import Layouts, SlotChoice
from esper.leyline import ConfigError, draw_key
from esper.leyline.depth import Depth
from esper.leyline.growth_settings import Precision
from esper.tolaria.engine.batches import DataSource
from esper.tolaria.engine.objectives import Objective


@dataclass(frozen=True)
class HostRecipe:
    """How to make one host and train it. `build` runs with torch's generators seeded by the key.

    With `precision` bf16 or fp16 the products of forward and backward passes are computed in that
    format; parameters, optimizer and objectives stay in float32.
    `layout` and `causal` are those of `GrownModule.wrap`.
    `weights` are the state dicts of trained hosts, by key.
    """

    build: Callable[[], nn.Module]
    slots: SlotChoice | Depth
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
            known = ", ".join(get_args(Precision))
            raise ConfigError(f"precision must be one of {known}, got {self.precision!r}")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm must be above 0 or None, got {self.max_grad_norm}")


def new_host(recipe: HostRecipe, key: int, device: torch.device) -> nn.Module:
    """The host of a key, with initial or given weights. Raises ConfigError if it has no trainable
    parameters, or if its weights are missing."""
    with keyed(draw_key(key, "host"), [device]):
        host = recipe.build()
    if len(devices_of(host)) < 2:  # else its parts stay where they are
        host.to(device)
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
    return GrownModule.wrap(
        new_host(recipe, key, device),
        recipe.slots,
        recipe.data.example(),
        recipe.catalogue,
        layout=recipe.layout,
        causal=recipe.causal,
    )


def export_network(recipe: HostRecipe, network: GrownModule) -> nn.Module:
    """`network`, of this recipe, as a plain module."""
    return export(network, recipe.data.example())


def target_for(output: Any, target: Any) -> Any:
    """The target on the device of the output, which may not be that of the input."""
    device = next((tensor.device for tensor in tensors_in(output)), None)
    return target if device is None else map_tensors(lambda tensor: tensor.to(device), target)
