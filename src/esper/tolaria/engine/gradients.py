"""Gradients of seeds compared with those of their host, on some batches of an epoch, measured
before gradients are clipped.
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
        self.stored: dict[nn.Parameter, Tensor] = {}
        self.watched: list[nn.Parameter] = []

    def watch(self) -> list[RemovableHandle]:
        """For a user's loop, which may clip gradients before `observe`: add hooks that store norms
        in the backward pass; of several passes that accumulate, the last one counts. They are used
        for the ratio only, which does not depend on the scale of the loss."""
        if not self.slots:
            return []
        seeds = (self.network.seed_parameters(index) for index in self.slots)
        self.watched = [*self.network.host_parameters(), *(p for seed in seeds for p in seed)]
        return [param.register_post_accumulate_grad_hook(self._store) for param in self.watched]

    def store(self) -> None:
        """Store the norms of the current gradients, which have been averaged over processes."""
        for param in self.watched:
            self._store(param)

    def _store(self, param: Tensor) -> None:
        if self.batches % STRIDE == 0 and param.grad is not None:
            assert isinstance(param, nn.Parameter)
            self.stored[param] = param.grad.detach().norm()

    def observe(self) -> None:
        if self.slots and self.batches % STRIDE == 0:
            self._measure()
        self.stored.clear()
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
        """[n]: norms stored in the backward pass, else those of the current gradients."""
        stored = [self.stored[p] for p in params if p in self.stored]
        return _together(stored) if stored else _norms(params)

    def result(self) -> dict[str, np.ndarray]:
        """Columns of the slot table, [S] each; NaN, or healthy, where nothing was measured."""
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
    """[n]: norms of the n gradients that are not None."""
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
