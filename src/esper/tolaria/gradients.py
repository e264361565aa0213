"""How strongly a seed learns compared with its host, measured on some batches of an epoch."""

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from esper.growth import GrownModule
from esper.leyline import IS_ACTIVE
from esper.leyline.constants import GRADIENT_RATIO_CAP

STRIDE = 10
MEASURED = ("gradient_ratio", "gradient_norm", "gradient_health")


def gradient_ratio(seed: ArrayLike, host: ArrayLike, n_seed: ArrayLike, n_host: int) -> np.ndarray:
    """(|g_seed| / |g_host|) * sqrt(n_host / n_seed), at most GRADIENT_RATIO_CAP; 0 where the host
    has as good as no gradient, or the seed no parameters."""
    comparable = (np.asarray(host) >= 1e-8) & (np.asarray(n_seed) > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.divide(seed, host) * np.sqrt(np.divide(n_host, n_seed))
    return np.where(comparable, np.minimum(ratio, GRADIENT_RATIO_CAP), 0.0)


class GradientMeter:
    """Call `observe` after every backward pass; every STRIDE-th, from the first, is measured.

    gradient_ratio    |g_seed| against |g_host|, per parameter
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
        host = _total(_norms(host_params))
        n_host = sum(p.numel() for p in host_params)
        for index in self.slots:
            params = self.network.seed_parameters(index)
            norms = _norms(params)
            seed = _total(norms)
            n_seed = sum(p.numel() for p in params)
            self.readings[index].append(
                {
                    "gradient_ratio": float(gradient_ratio(seed, host, n_seed, n_host)),
                    "gradient_norm": seed,
                    "gradient_health": _health(norms, len(params)),
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
            columns["healthy"][index] = _all_finite(self.network.seed_parameters(index))
        return columns


def _norms(params: list[nn.Parameter]) -> Tensor:
    """[n]: norms of the n gradients that there are."""
    grads = [p.grad for p in params if p.grad is not None]
    norms = torch._foreach_norm(grads) if grads else ()
    # A network may be spread over devices.
    return torch.stack([n.to(norms[0].device) for n in norms]) if norms else torch.empty(0)


def _total(norms: Tensor) -> float:
    return float(torch.linalg.vector_norm(norms)) if len(norms) else 0.0


def _health(norms: Tensor, n_params: int) -> float:
    return (
        sum(0.0 < norm < math.inf for norm in norms.tolist()) / n_params if n_params else math.nan
    )


def _all_finite(params: list[nn.Parameter]) -> bool:
    values = [param.detach() for param in params]
    largest = torch._foreach_norm(values, ord=math.inf) if values else ()
    return all(math.isfinite(value) for value in map(float, largest))
