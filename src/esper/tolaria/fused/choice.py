"""Which population trains the hosts of a run: by name, or by a rule.

Fused hosts agree with looped ones to rounding, not bit for bit, so the choice belongs to the run:
it is made once, before anything is trained, and kept with the run's settings.
"""

import logging
from typing import Literal, get_args

import torch

from esper.growth.blueprints.catalogue import count_params
from esper.leyline import ConfigError
from esper.tolaria.engine.recipe import HostRecipe, new_network
from esper.tolaria.fused.fits import refuse_unless_fusable, why_not_fused

log = logging.getLogger("esper")

PopulationKind = Literal["looped", "fused"]
PopulationChoice = Literal["auto", "looped", "fused"]

# Where the fused population begins to win, by `python benchmarks/population.py table`.
FEWEST_FUSED_HOSTS = 4
MOST_FUSED_PARAMS = 30_000
MOST_FUSED_MACS = 200_000


def check_population(choice: str) -> None:
    """Raises ConfigError for a choice that there is not."""
    known = get_args(PopulationChoice)
    if choice not in known:
        raise ConfigError(
            f"population must be {', '.join(known[:-1])} or {known[-1]}, got {choice!r}"
        )


def choose_population(
    recipe: HostRecipe, n_envs: int, choice: str = "auto", device: str | torch.device = "cpu"
) -> PopulationKind:
    """What trains `n_envs` hosts. `auto` decides by their shape and number alone, so that the same
    command gives the same bytes on every machine.

    The reason is logged. Raises ConfigError if `fused` is asked for and cannot be.
    """
    check_population(choice)
    if choice == "looped":
        return "looped"
    if choice != "fused" and n_envs < FEWEST_FUSED_HOSTS:
        return _chosen("looped", f"{n_envs} are fewer than {FEWEST_FUSED_HOSTS}")
    template = new_network(recipe, 0, torch.device(device))
    if choice == "fused":
        refuse_unless_fusable(recipe, template)
        return "fused"
    reason = why_not_fused(recipe, template)
    if reason is not None:
        return _chosen("looped", reason)
    params, macs = count_params(template.host), template.host_macs
    kind: PopulationKind = "looped"
    if params <= MOST_FUSED_PARAMS and macs <= MOST_FUSED_MACS:
        kind = "fused"
    return _chosen(kind, f"{n_envs} hosts of {params:,} parameters and {macs:,} multiply-adds")


def _chosen(kind: PopulationKind, reason: str) -> PopulationKind:
    log.info("hosts are %s: %s", kind, reason)
    return kind
