"""Recipes to try candidates in, and trials run the simplest way."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from esper.growth import MLPHost, TransformerHost, default_catalogue, keyed, seed_costs
from esper.leyline import SeedStage
from esper.tamiyo import TrialPlan
from esper.tolaria import HostRecipe, LoopedPopulation, TensorSource
from esper.tolaria.objectives import accuracy, cross_entropy
from esper.tolaria.trials import candidate_key, trial_batches, trial_parts
from helpers import small_digits

EVERYTHING = default_catalogue().names


def text(loss: Any = cross_entropy) -> HostRecipe:
    """A transformer on random tokens that are to be copied."""

    def host() -> nn.Module:
        return TransformerHost(16, n_embd=16, n_head=4, n_layer=3, block_size=8, dropout=0.1)

    with keyed(0):
        tokens = torch.randint(0, 16, (300, 8))
    return HostRecipe(
        build=host,
        slots=tuple(f"blocks.{i}" for i in range(3)),
        data=TensorSource((tokens[:150],) * 2, (tokens[150:],) * 2, batch=64),
        loss=loss,
        score=accuracy,
        optimizer=lambda params: AdamW(params, lr=1e-2, weight_decay=0.1),
        catalogue=default_catalogue(),
    )


def recipe(name: str, **changes: Any) -> HostRecipe:
    """`cnn` and `mlp` on 150 digits: two whole batches and one of 22; `transformer` on tokens."""
    if name == "transformer":
        return replace(text(), **changes)
    task, data = small_digits(train=150, val=150)
    made = task.recipe(data)
    if name == "mlp":
        made = replace(made, build=lambda: MLPHost(64, hidden=8, n_layers=3))
    return replace(made, **changes)


def everything(population: Any) -> np.ndarray:
    """bool[E, S, B]: every blueprint that fits an empty slot, for all hosts."""
    template, hosts = population.template, len(population.keys)
    tried = np.zeros((hosts, len(template.sites), len(template.catalogue)), dtype=bool)
    tried[:] = seed_costs(template.catalogue, template.sites, template.output)[0]
    return tried


def by_hand(
    population: LoopedPopulation, env: int, slot: int, blueprint: int, plan: TrialPlan, step: int
) -> float:
    """The gain of one candidate: plant it, train it alone with a new optimiser, compare."""
    network, made = population.networks[env], population.recipe
    key = int(population.keys[env])
    network.eval()

    def loss() -> float:
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in trial_parts(made.data, plan):
                total += float(made.loss(network(x), y)) * len(x)
                count += len(x)
        return total / count

    before = loss()
    network.germinate(slot, blueprint, 0, candidate_key(key, step, slot, blueprint))
    network.set_blend(slot, SeedStage.HOLDING, 1.0)
    params = network.seed_parameters(slot)
    optimizer = made.optimizer(params)
    for x, y in trial_batches(made.data, key, step, plan):
        network.zero_grad()
        made.loss(network(x), y).backward()
        if made.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(params, made.max_grad_norm)
        optimizer.step()
    after = loss()
    network.remove(slot)
    network.zero_grad()
    return before - after


class Skips(nn.Module):
    """A classifier of digits that adds what it had before its second slot to what comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1)).relu()
        return self.head(h + self.second(h).relu())


class MixesExamples(Skips):
    """One whose answer to an example depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x.flatten(1)).relu()).relu()
        return self.head(h - h.mean(dim=0))


class InPlace(Skips):
    """One that changes its features in place, and counts its passes in a buffer."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        h = self.second(self.first(x.flatten(1)).relu_()).relu_()
        return self.head(h)
