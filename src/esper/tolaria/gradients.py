"""How strongly a seed learns compared with its host, measured on some batches of an epoch."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from esper.growth import GrownModule
from esper.leyline import IS_ACTIVE
from esper.leyline.constants import GRADIENT_RATIO_CAP

STRIDE = 10


@dataclass(frozen=True)
class GradientReadings:
    """One value per slot; NaN where there was no seed to measure.

    ratio    (|g_seed| / |g_host|) * sqrt(n_host / n_seed), at most GRADIENT_RATIO_CAP
    norm     |g_seed|
    health   share of the seed's parameter tensors with a finite, non-zero gradient
    finite   False if a parameter of the seed is not finite any more
    """

    ratio: np.ndarray
    norm: np.ndarray
    health: np.ndarray
    finite: np.ndarray


class GradientMeter:
    """Call `observe` after every backward pass; every STRIDE-th, from the first, is measured."""

    def __init__(self, network: GrownModule) -> None:
        self.network = network
        self.slots = [i for i, slot in network.each_slot() if IS_ACTIVE[slot.stage]]
        self.batches = 0
        self.readings: dict[int, list[tuple[float, float, float]]] = {i: [] for i in self.slots}

    def observe(self) -> None:
        if self.slots and self.batches % STRIDE == 0:
            self._measure()
        self.batches += 1

    @torch.no_grad()
    def _measure(self) -> None:
        host_params = self.network.host_parameters()
        host = _norm(host_params)
        n_host = sum(p.numel() for p in host_params)
        for index in self.slots:
            params = self.network.seed_parameters(index)
            seed = _norm(params)
            n_seed = sum(p.numel() for p in params)
            ratio = seed / host * math.sqrt(n_host / n_seed) if host >= 1e-8 and n_seed else 0.0
            self.readings[index].append(
                (min(ratio, GRADIENT_RATIO_CAP) if ratio == ratio else ratio, seed, _health(params))
            )

    def result(self) -> GradientReadings:
        n_slots = len(self.network.sites)
        columns = np.full((n_slots, 3), np.nan)
        finite = np.ones(n_slots, dtype=bool)
        for index in self.slots:
            if self.readings[index]:
                columns[index] = np.mean(self.readings[index], axis=0)
            finite[index] = all(
                bool(torch.isfinite(p).all()) for p in self.network.seed_parameters(index)
            )
        return GradientReadings(columns[:, 0], columns[:, 1], columns[:, 2], finite)


def _norm(params: list[nn.Parameter]) -> float:
    grads = [p.grad for p in params if p.grad is not None]
    return float(get_total_norm(grads)) if grads else 0.0


def _health(params: list[nn.Parameter]) -> float:
    alive = [p.grad is not None and 0.0 < float(p.grad.norm()) < math.inf for p in params]
    return sum(alive) / len(alive) if alive else math.nan
