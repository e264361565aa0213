"""How strongly a seed learns compared with its host, measured on some batches of an epoch.

Host and seed are compared by the gradients that the loss gave them, before anybody clips them.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.grown_module import GrownModule
from esper.growth.slot_table import GradientReading, measurements
from esper.leyline import IS_ACTIVE

STRIDE = 10


class GradientMeter:
    """Call `observe` after every backward pass, before gradients are clipped; every STRIDE-th, from
    the first, is measured: `measurements()` of the slot table, and `healthy`, which is False if a
    parameter of the seed is not finite any more."""

    def __init__(self, network: GrownModule) -> None:
        self.network = network
        self.slots = [i for i, slot in network.each_slot() if IS_ACTIVE[slot.stage]]
        self.batches = 0
        self.readings: dict[int, list[dict[str, float]]] = {i: [] for i in self.slots}
        self.noted: dict[nn.Parameter, Tensor] = {}

    def watch(self) -> list[RemovableHandle]:
        """For a loop that is not ours: note gradients as the backward pass leaves them, because
        whoever calls `observe` later sees them clipped. Of several passes that add up, the last one
        counts. `gradient_norm` and `gradient_health` stay what `observe` finds: where a loss is
        scaled, only the ratio is free of the scale."""
        if not self.slots:
            return []
        seeds = (self.network.seed_parameters(index) for index in self.slots)
        params = [*self.network.host_parameters(), *(p for seed in seeds for p in seed)]
        return [param.register_post_accumulate_grad_hook(self._note) for param in params]

    def _note(self, param: Tensor) -> None:
        if self.batches % STRIDE == 0 and param.grad is not None:
            assert isinstance(param, nn.Parameter)
            self.noted[param] = param.grad.detach().norm()

    def observe(self) -> None:
        if self.slots and self.batches % STRIDE == 0:
            self._measure()
        self.noted.clear()
        self.batches += 1

    @torch.no_grad()
    def _measure(self) -> None:
        host_params = self.network.host_parameters()
        host = _total(self._unclipped(host_params))
        n_host = sum(p.numel() for p in host_params)
        for index in self.slots:
            params = self.network.seed_parameters(index)
            norms = _norms(params)
            reading = GradientReading(
                norm=_total(norms),
                unclipped_norm=_total(self._unclipped(params)),
                host_norm=host,
                params=sum(p.numel() for p in params),
                host_params=n_host,
                live_tensors=sum(0.0 < norm < math.inf for norm in norms.tolist()),
                tensors=len(params),
            )
            self.readings[index].append(
                {name: float(measure(reading)) for name, measure in measurements().items()}
            )

    def _unclipped(self, params: list[nn.Parameter]) -> Tensor:
        """[n]: norms as noted in the backward pass, else those of the gradients as they are."""
        noted = [self.noted[p] for p in params if p in self.noted]
        return _together(noted) if noted else _norms(params)

    def result(self) -> dict[str, np.ndarray]:
        """Columns of the slot table, [S] each; what was not measured is NaN, or healthy."""
        n_slots = len(self.network.sites)
        columns = {name: np.full(n_slots, np.nan) for name in measurements()}
        columns["healthy"] = np.ones(n_slots, dtype=bool)
        for index in self.slots:
            readings = self.readings[index]
            for name in measurements() if readings else ():
                columns[name][index] = np.mean([reading[name] for reading in readings])
            columns["healthy"][index] = _all_finite(self.network.seed_parameters(index))
        return columns


def _norms(params: list[nn.Parameter]) -> Tensor:
    """[n]: norms of the n gradients that there are."""
    grads = [p.grad for p in params if p.grad is not None]
    return _together(list(torch._foreach_norm(grads)) if grads else [])


def _together(norms: list[Tensor]) -> Tensor:
    # A network may be spread over devices.
    return torch.stack([n.to(norms[0].device) for n in norms]) if norms else torch.empty(0)


def _total(norms: Tensor) -> float:
    return float(torch.linalg.vector_norm(norms)) if len(norms) else 0.0


def _all_finite(params: list[nn.Parameter]) -> bool:
    values = [param.detach() for param in params]
    largest = torch._foreach_norm(values, ord=math.inf) if values else ()
    return all(math.isfinite(value) for value in map(float, largest))
