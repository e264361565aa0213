"""What a seed costs: parameters and multiply-adds, without making it."""

from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from esper.growth.blueprints import BlueprintCatalogue, BlueprintSpec, OutputSpec
from esper.growth.seed_slot import BlendValve
from esper.leyline import ConfigError, InjectionSpec


def count_params(module: nn.Module) -> int:
    """Trainable parameters, shared ones once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


@lru_cache(maxsize=4096)
def _seed_cost(
    blueprint: BlueprintSpec, site: InjectionSpec, output: OutputSpec | None
) -> tuple[int, int] | None:
    try:
        with torch.device("meta"):
            seed = blueprint.build(site, output)
            features = torch.zeros(1, *site.shape)
    except ConfigError:
        return None
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        seed.eval()(features)
    return count_params(seed), site.calls * counter.get_total_flops() // 2


def seed_costs(
    catalogue: BlueprintCatalogue, sites: list[InjectionSpec], output: OutputSpec | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(fits, params, macs), each [S, B]: can the blueprint grow there, and at what cost?

    Multiply-adds are per example; both costs are 0 where the blueprint does not fit.
    """
    shape = (len(sites), len(catalogue))
    fits = np.zeros(shape, dtype=bool)
    params, macs = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for s, site in enumerate(sites):
        for b, blueprint in enumerate(catalogue.specs):
            cost = _seed_cost(blueprint, site, output)
            if cost is not None:
                fits[s, b], params[s, b], macs[s, b] = True, *cost
    return fits, params, macs


def valve_params(sites: list[InjectionSpec]) -> np.ndarray:
    """int[S]: parameters of the valve that a gated blend adds while it lasts."""
    with torch.device("meta"):
        return np.array([count_params(BlendValve(site.channels, 2, 2)) for site in sites])


def example_params(blueprint: BlueprintSpec, topology: str, width: int) -> int | None:
    """Parameters of a seed of that width on a network with ten outputs; None if it has no form."""
    shape = {"cnn": (width, 8, 8), "transformer": (8, width), "mlp": (width,)}.get(topology)
    if shape is None:
        return None
    site = InjectionSpec("r0c0", width, 0.0, (0, 1), "", topology, shape)
    cost = _seed_cost(blueprint, site, OutputSpec(10, per_position=False))
    return None if cost is None else cost[0]
