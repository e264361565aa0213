"""A looped and a fused population of the same hosts, and the way from one to the other."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.growth.hosts import MLPHost
from esper.leyline import SeedStage
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.fused.population import FusedPopulation
from esper.tolaria.fused.rows import Kind, Row
from helpers import small_digits


def recipe(
    host: str = "cnn", catalogue: BlueprintCatalogue | None = None, **changes: Any
) -> HostRecipe:
    """`digits` with 150 examples: two whole batches and one of 22."""
    task, data = small_digits(train=150, val=100)
    made = task.recipe(data, catalogue)
    if host == "mlp":
        slots = tuple(f"blocks.{i}" for i in range(3))
        made = replace(made, build=lambda: MLPHost(64, hidden=8, n_layers=3), slots=slots)
    return replace(made, **changes)


def pair(made: HostRecipe, keys: list[int]) -> tuple[LoopedPopulation, FusedPopulation]:
    return LoopedPopulation(made, keys), FusedPopulation(made, keys)


def plant(
    populations: tuple[Any, ...],
    env: int,
    slot: int,
    blueprint: str,
    stage: SeedStage = SeedStage.HOLDING,
    alpha: float = 1.0,
    blend: int = 0,
) -> None:
    for population in populations:
        index = population.template.catalogue.index(blueprint)
        population.germinate(env, slot, index, blend, key=17 * env + slot)
        population.set_blend(env, slot, stage, alpha)


def shake(looped: LoopedPopulation, size: float = 0.2) -> None:
    """Move all seeds away from birth, where they hardly act."""
    with torch.no_grad():
        for env, network in enumerate(looped.networks):
            generator = torch.Generator().manual_seed(env)
            for slot, _ in network.each_slot():
                for param in network.seed_parameters(slot):
                    param.add_(size * torch.randn(param.shape, generator=generator))


def _row(kind: Kind, module: nn.Module, state: dict[Any, dict[str, Any]]) -> Row:
    """The row of a module and its optimizer's state; parameters without any have no moments."""
    parts, steps = [], 0
    for param in module.parameters():
        known = state.get(param, {})
        steps = int(known.get("step", 0))
        zero = torch.zeros_like(param)
        moments = [known.get(name, zero) for name in ("exp_avg", "exp_avg_sq")]
        parts.append(torch.stack([param.detach(), *moments]).reshape(3, -1))
    return Row(kind, torch.cat(parts, dim=1), steps)


def adopt(fused: FusedPopulation, looped: LoopedPopulation) -> None:
    """Give the fused hosts and seeds the weights and moments of the looped ones."""
    for env, network in enumerate(looped.networks):
        state = looped.optimizers[env].state
        fused.hosts[env] = _row(fused.host_kind, network.host, state)
        for index, slot in network.each_slot():
            seed = fused.seeds[env][index]
            assert (seed is None) == (slot.seed is None)
            if seed is not None and slot.seed is not None:
                row, valve = _row(seed.row.kind, slot.seed, state), None
                if slot.valve is not None:
                    assert seed.valve is not None
                    valve = _row(seed.valve.kind, slot.valve, state)
                fused.seeds[env][index] = replace(seed, row=row, valve=valve)


def largest_gap(fused: FusedPopulation, looped: LoopedPopulation) -> float:
    """Largest difference of any parameter of any host or seed."""
    gap = torch.zeros(())
    for env, network in enumerate(looped.networks):
        ours = dict(fused.network(env).named_parameters())
        theirs = dict(network.named_parameters())
        assert ours.keys() == theirs.keys()
        gaps = [(ours[name] - param).detach().abs().max() for name, param in theirs.items()]
        gap = torch.stack([gap, *gaps]).max()
    return float(gap)


def assert_epochs_equal(
    looped: LoopedPopulation,
    fused: FusedPopulation,
    running: np.ndarray | None = None,
    epochs: int = 2,
    tolerance: float = 2e-6,
) -> None:
    """Each epoch from the same weights: training, validation and readings are the same."""
    n_envs, n_slots = len(looped.keys), len(looped.template.sites)
    running = np.ones(n_envs, dtype=bool) if running is None else running
    everybody, whole = np.arange(n_envs), np.ones((n_envs, n_slots), dtype=bool)
    for step in range(epochs):
        adopt(fused, looped)
        theirs, ours = (p.train_epoch(running, step) for p in (looped, fused))
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(ours.score, theirs.score, atol=1e-4)
        assert np.array_equal(ours.finite, theirs.finite)
        assert (ours.batches, ours.samples) == (theirs.batches, theirs.samples)
        assert ours.seeds.keys() == theirs.seeds.keys()
        for name, column in theirs.seeds.items():
            np.testing.assert_allclose(ours.seeds[name], column, rtol=2e-3, atol=1e-6, err_msg=name)
        found, expected = (p.evaluate(everybody, whole) for p in (fused, looped))
        np.testing.assert_allclose(found.loss, expected.loss, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(found.alpha, expected.alpha, atol=1e-6)
        assert found.samples == expected.samples
