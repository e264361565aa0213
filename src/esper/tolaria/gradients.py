"""How strongly a seed learns compared with its host, measured on some batches of an epoch."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from esper.growth import GrownModule
from esper.leyline import IS_ACTIVE
from esper.leyline.constants import GRADIENT_RATIO_CAP

STRIDE = 10
MEASURED = ("gradient_ratio", "gradient_norm", "gradient_health")


class GradientMeter:
    """Call `observe` after every backward pass; every STRIDE-th, from the first, is measured.

    gradient_ratio    (|g_seed| / |g_host|) * sqrt(n_host / n_seed), at most GRADIENT_RATIO_CAP
    gradient_norm     |g_seed|
    gradient_health   share of the seed's parameter tensors with a finite, non-zero gradient
    healthy           False if a parameter of the seed is not finite any more
    """

    def __init__(self, network: GrownModule) -> None:
        self.network = network
        self.slots = [i for i, slot in network.each_slot() if IS_ACTIVE[slot.stage]]
        self.batches = 0
        self.readings: dict[int, list[dict[str, float]]] = {i: [] for i in self.slots}

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
                {
                    "gradient_ratio": min(ratio, GRADIENT_RATIO_CAP) if ratio == ratio else ratio,
                    "gradient_norm": seed,
                    "gradient_health": _health(params),
                }
            )

    def result(self) -> dict[str, np.ndarray]:
        """Columns of the slot table, [S] each; what was not measured is NaN, or healthy."""
        n_slots = len(self.network.sites)
        columns = {name: np.full(n_slots, np.nan) for name in MEASURED}
        columns["healthy"] = np.ones(n_slots, dtype=bool)
        for index in self.slots:
            readings = self.readings[index]
            for name in MEASURED if readings else ():
                columns[name][index] = np.mean([reading[name] for reading in readings])
            columns["healthy"][index] = all(
                bool(torch.isfinite(p).all()) for p in self.network.seed_parameters(index)
            )
        return columns


def _norm(params: list[nn.Parameter]) -> float:
    grads = [p.grad for p in params if p.grad is not None]
    return float(get_total_norm(grads)) if grads else 0.0


def _health(params: list[nn.Parameter]) -> float:
    alive = [p.grad is not None and 0.0 < float(p.grad.norm()) < math.inf for p in params]
    return sum(alive) / len(alive) if alive else math.nan
