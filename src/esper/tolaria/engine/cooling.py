"""Cooling: scale down the output of a starved host, so that it can learn again.

A classifier that has memorised its data has such large outputs that the gradients of the loss
vanish, also for seeds. A factor below 1 on the output changes no prediction and restores the
gradients. The factor is folded into the last layer.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.growth.devices import keyed, on_device
from esper.growth.sites import batch_size, call_model, evaluating
from esper.leyline import draw_key
from esper.leyline.constants import COOLING_ANSWERS, COOLING_SAMPLES
from esper.tolaria.engine.batches import Batch
from esper.tolaria.engine.gradients import answers, find_tau
from esper.tolaria.engine.population import Population
from esper.tolaria.engine.recipe import HostRecipe, target_for


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
