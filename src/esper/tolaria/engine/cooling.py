"""Cooling: scale down the output of a starved host, so that it can learn again.

A classifier that has memorised its data has such large outputs that the gradients of the loss
vanish, also for seeds. A factor below 1 on the output changes no prediction and restores the
gradients. The factor is folded into the last layer.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.growth.devices import keyed, on_device
from esper.growth.sites import batch_size, call_model, evaluating
from esper.leyline import draw_key
from esper.leyline.constants import (
    COOLING_ANSWERS,
    COOLING_SAMPLES,
    COOLING_STARVED,
    COOLING_TARGET,
)
from esper.tolaria.engine.batches import Batch
from esper.tolaria.engine.objectives import IGNORED, Objective, by_class, cross_entropy, named
from esper.tolaria.engine.population import Population
from esper.tolaria.engine.recipe import HostRecipe, target_for

# The first and then every STRIDE-th batch of an epoch is measured.
STRIDE = 4
# Steps of the bisection for tau: enough for float64.
HALVINGS = 60


def answers(loss: Objective, output: Any, target: Any) -> tuple[Tensor, Tensor] | None:
    """Logits [N, K] and classes [N] of a batch, without ignored ones; None if this is no
    classification by class indices."""
    found = _classification(loss, output, target)
    if found is None:
        return None
    logits, classes = found
    counted = classes != IGNORED
    return logits[counted], classes[counted]


def _classification(loss: Objective, output: Any, target: Any) -> tuple[Tensor, Tensor] | None:
    """As `answers`, with those that are IGNORED."""
    if not can_starve(loss) or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    axis = loss.keywords["axis"] if isinstance(loss, partial) else None
    logits, classes = by_class(output, target, axis)
    return (logits, classes) if logits.shape[-1] > 1 else None


def starvation(logits: Tensor, classes: Tensor) -> Tensor:
    """rho: the mean of ||softmax(z) - onehot(y)||, the norm of the gradient of the loss by the
    logits [..., N, K], for classes [..., N] that are not IGNORED. Near 0 nothing is left to
    learn."""
    # Without selecting rows: a GPU would have to wait for their number.
    counted = classes != IGNORED
    gap = logits.softmax(dim=-1)
    right = torch.where(counted, classes, 0)[..., None]
    gap = gap.scatter_add(-1, right, -torch.ones_like(gap[..., :1]))
    return torch.where(counted, gap.norm(dim=-1), 0.0).sum(dim=-1) / counted.sum(dim=-1)


def find_tau(logits: Tensor, classes: Tensor) -> tuple[float, float]:
    """(rho, tau) of logits [N, K]: for a starved host tau is the factor with which rho becomes
    COOLING_TARGET, else 1. It always exists: with the factor 0 rho is sqrt(1 - 1/K)."""
    # On the CPU: the bisection would wait for a GPU in every step, and MPS has no float64.
    logits, classes = logits.cpu().double(), classes.cpu()
    rho = float(starvation(logits, classes))
    if not rho < COOLING_STARVED:
        return rho, 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if float(starvation(middle * logits, classes)) >= COOLING_TARGET:
            low = middle
        else:
            high = middle
    return rho, high


def can_starve(loss: Objective) -> bool:
    """Whether this is the loss of a classification."""
    return named(loss) is cross_entropy


def batch_rho(loss: Objective, output: Any, target: Any) -> Tensor:
    """rho of a training batch; NaN if it is not defined."""
    found = _classification(loss, output, target)
    if found is None:
        return torch.tensor(math.nan)
    return starvation(found[0].detach().float(), found[1])


@dataclass(frozen=True)
class Cooling:
    """The result for one host: its `rho` before, the factor `tau` on its output, and the number of
    examples that were used. `refused` is the reason if a starved host could not be cooled."""

    rho: float
    tau: float
    samples: int
    refused: str | None = None


class Cooler:
    """Measures hosts of a population, and cools those that are starved."""

    def __init__(self, population: Population, recipe: HostRecipe, device: torch.device) -> None:
        self.population, self.recipe, self.device = population, recipe, device

    def cost(self, macs: np.ndarray) -> np.ndarray:
        """The maximum multiply-adds of measuring networks that cost `macs` per example."""
        return COOLING_SAMPLES * macs

    def cool(self, env: int, step: int) -> Cooling:
        key = draw_key(int(self.population.keys[env]), "cooling", step)
        found, samples = self._logits(env, key)
        if found is None:
            return Cooling(math.nan, 1.0, samples)
        rho, tau = find_tau(*found)
        refused = None if tau == 1.0 else self.population.cool(env, tau)
        return Cooling(rho, tau if refused is None else 1.0, samples, refused)

    def _logits(self, env: int, key: int) -> tuple[tuple[Tensor, Tensor] | None, int]:
        """Logits and classes of some training examples, and the number of examples."""
        network, data = self.population.network(env), self.recipe.data
        logits, classes, samples = list[Tensor](), list[Tensor](), 0
        with evaluating(network), keyed(key, [self.device]):
            for batch in data.train_batches(key):
                inputs, target = _first(batch, COOLING_SAMPLES - samples)
                output = call_model(network, on_device(inputs, self.device))
                found = answers(self.recipe.loss, output, target_for(output, target))
                samples += batch_size(inputs)
                if found is None:
                    return None, samples
                logits.append(found[0])
                classes.append(found[1])
                if samples >= COOLING_SAMPLES or sum(map(len, classes)) >= COOLING_ANSWERS:
                    break
        return (torch.cat(logits), torch.cat(classes)), samples


def _first(batch: Batch, size: int) -> Batch:
    """At most `size` examples, if input and target are plain tensors."""
    inputs, target = batch
    if isinstance(inputs, Tensor) and isinstance(target, Tensor):
        return inputs[:size], target[:size]
    return batch
