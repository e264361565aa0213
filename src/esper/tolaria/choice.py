"""Which population trains the hosts of a run: a rule, or a measurement on this machine.

Fused hosts agree with looped ones to rounding, not bit for bit, so the choice belongs to the run:
it is made once, before anything is trained, and kept with the run's settings.
"""

import logging
import time
from statistics import median
from typing import Literal, get_args

import numpy as np
import torch

from esper.growth import count_params, seed_costs
from esper.leyline import ConfigError, SeedStage
from esper.tamiyo import usable_blueprints
from esper.tolaria.fused import FusedPopulation, refuse_unless_fusable, why_not_fused
from esper.tolaria.population import LoopedPopulation, Population
from esper.tolaria.recipe import HostRecipe, new_network

log = logging.getLogger("esper")

PopulationKind = Literal["looped", "fused"]
PopulationChoice = Literal["auto", "looped", "fused", "measure"]

# Where the fused population begins to win, by `python benchmarks/population.py table`.
FEWEST_FUSED_HOSTS = 4
MOST_FUSED_PARAMS = 30_000
MOST_FUSED_MACS = 200_000

WORTH_IT = 1.2  # fused hosts must be so much quicker, or the readable loop is as good
TIMED_EPOCHS = 3


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
    command gives the same bytes on every machine; `measure` times both here.

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
    if choice == "measure":
        ratio = measure(recipe, n_envs, device)
        words = f"fused hosts take {1 / ratio:.2f} of the loop's time on this machine"
        return _chosen("fused" if ratio >= WORTH_IT else "looped", words)
    params, macs = count_params(template.host), template.host_macs
    kind: PopulationKind = "looped"
    if params <= MOST_FUSED_PARAMS and macs <= MOST_FUSED_MACS:
        kind = "fused"
    return _chosen(kind, f"{n_envs} hosts of {params:,} parameters and {macs:,} multiply-adds")


def _chosen(kind: PopulationKind, reason: str) -> PopulationKind:
    log.info("hosts are %s: %s", kind, reason)
    return kind


def measure(recipe: HostRecipe, n_envs: int, device: str | torch.device = "cpu") -> float:
    """CPU time of looped hosts over that of fused ones, for the same epochs with different seeds
    planted in every host."""
    populations = [
        kind(recipe, range(n_envs), device) for kind in (LoopedPopulation, FusedPopulation)
    ]
    for population in populations:
        _plant(population)
        _timed_epoch(population, 0)
    ratios = []
    for step in range(1, 1 + TIMED_EPOCHS):
        looped, fused = (_timed_epoch(population, step) for population in populations)
        ratios.append(looped / fused)
    return median(ratios)


def _plant(population: Population) -> None:
    """One seed in each host: every second one isolated, the others half blended in."""
    template = population.template
    fits, _, _ = seed_costs(template.catalogue, template.sites, template.output)
    # By blueprint: neighbours get the same one in different slots.
    kinds = np.argwhere(usable_blueprints(template.catalogue, fits).T).tolist()
    for env in range(len(population.keys)):
        blueprint, slot = kinds[env % len(kinds)]
        population.germinate(env, slot, blueprint, blend=0, key=env)
        stage = SeedStage.TRAINING if env % 2 else SeedStage.BLENDING
        population.set_blend(env, slot, stage, 0.0 if env % 2 else 0.5)


def _timed_epoch(population: Population, step: int) -> float:
    """CPU seconds of an epoch, and of validation of every host with its seed and without."""
    n_envs, n_slots = len(population.keys), len(population.template.sites)
    began = time.process_time()
    population.train_epoch(np.ones(n_envs, dtype=bool), step)
    present = np.repeat([[True], [False]], n_envs, axis=0).repeat(n_slots, axis=1)
    population.evaluate(np.tile(np.arange(n_envs), 2), present)
    return time.process_time() - began
