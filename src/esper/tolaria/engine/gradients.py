"""Readings of training: gradients of host and seeds, and rho, by which a host is starved."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.devices import to_host
from esper.growth.grown_module import GrownModule
from esper.growth.slot_table import GradientReading, measurements
from esper.leyline import IS_ACTIVE
from esper.leyline.constants import COOLING_STARVED, COOLING_TARGET
from esper.tolaria.engine.objectives import IGNORED, Objective, by_class, cross_entropy, named

STRIDE = 10
# The first and then every RHO_STRIDE-th batch of an epoch is measured.
RHO_STRIDE = 4
# Steps of the bisection for tau: enough for float64.
HALVINGS = 60


@dataclass(frozen=True)
class _Reading:
    """Norms in one batch, still on the device: of the host's gradients; for each seed those of its
    n tensors [n], and in total, after and before clipping. `counts` are the numbers of tensors."""

    host: Tensor
    norms: list[Tensor]
    totals: list[tuple[Tensor, Tensor]]
    counts: list[int]

    def tensors(self) -> list[Tensor]:
        return [self.host, *self.norms, *(each for pair in self.totals for each in pair)]

    def filled(self, values: Iterator[Tensor]) -> "_Reading":
        """The same with the next `values`, in the order of `tensors`."""
        host, norms = next(values), [next(values) for _ in self.norms]
        return replace(
            self, host=host, norms=norms, totals=[(next(values), next(values)) for _ in self.totals]
        )

    @property
    def overflowed(self) -> bool:
        return not all(bool(tensor.isfinite().all()) for tensor in self.tensors())

    def of(self, seed: int, params: int, host_params: int) -> GradientReading:
        norm, unclipped = self.totals[seed]
        return GradientReading(
            norm=float(norm),
            unclipped_norm=float(unclipped),
            host_norm=float(self.host),
            params=params,
            host_params=host_params,
            live_tensors=sum(0.0 < norm < math.inf for norm in self.norms[seed].tolist()),
            tensors=self.counts[seed],
        )


class GradientMeter:
    """Call `observe` after every backward pass, before gradients are clipped; every STRIDE-th, from
    the first, is measured: `measurements()` of the slot table, and `healthy`, which is False if a
    parameter of the seed is not finite any more."""

    def __init__(self, network: GrownModule) -> None:
        self.network = network
        self.slots = [i for i, slot in network.each_slot() if IS_ACTIVE[slot.stage]]
        self.batches, self.scaled = 0, False
        self.readings: list[_Reading] = []
        self.stored: dict[nn.Parameter, Tensor] = {}
        self.watched: list[nn.Parameter] = []

    def watch(self) -> list[RemovableHandle]:
        """For a user's loop, which may clip gradients before `observe`: add hooks that store norms
        in the backward pass; of several passes that accumulate, the last one counts. They are used
        for the ratio only, which does not depend on the scale of the loss."""
        if not self.slots:
            return []
        seeds = (self.network.seed_parameters(index) for index in self.slots)
        host = (p for p in self.network.host_parameters() if p.requires_grad)
        self.watched = [*host, *(p for seed in seeds for p in seed)]
        return [param.register_post_accumulate_grad_hook(self._store) for param in self.watched]

    def store(self) -> None:
        """Store the norms of the current gradients, which have been averaged over processes."""
        for param in self.watched:
            self._store(param)

    def _store(self, param: Tensor) -> None:
        if self.batches % STRIDE == 0 and param.grad is not None:
            assert isinstance(param, nn.Parameter)
            self.stored[param] = param.grad.detach().norm()

    def observe(self, scale: Tensor | None = None, *, scaled: bool = False) -> None:
        """With `scaled` gradients, those of a GradScaler, batches that overflow are not counted;
        `scale` is what they are still multiplied by."""
        self.scaled |= scaled
        if self.slots and self.batches % STRIDE == 0:
            self._measure(scale)
        self.stored.clear()
        self.batches += 1

    @torch.no_grad()
    def _measure(self, scale: Tensor | None) -> None:
        seeds = [self.network.seed_parameters(index) for index in self.slots]
        host = _total(self._unclipped(self.network.host_parameters()))
        norms = [_norms(params) for params in seeds]
        if scale is not None:
            norms = [own / scale.to(own.device) for own in norms]
        totals = [
            (_total(own), _total(self._unclipped(params)))
            for own, params in zip(norms, seeds, strict=True)
        ]
        self.readings.append(_Reading(host, norms, totals, [len(params) for params in seeds]))

    def _unclipped(self, params: list[nn.Parameter]) -> Tensor:
        """[n]: norms stored in the backward pass, else those of the current gradients."""
        stored = [self.stored[p] for p in params if p in self.stored]
        return _together(stored) if stored else _norms(params)

    def result(self) -> dict[str, np.ndarray]:
        """Columns of the slot table, [S] each; NaN, or healthy, where nothing was measured."""
        n_slots = len(self.network.sites)
        columns = {name: np.full(n_slots, np.nan) for name in measurements()}
        columns["healthy"] = np.ones(n_slots, dtype=bool)
        params = [self.network.seed_parameters(index) for index in self.slots]
        finite, readings = self._fetched(params)
        n_host = sum(p.numel() for p in self.network.host_parameters())
        for number, index in enumerate(self.slots):
            size = sum(p.numel() for p in params[number])
            found = [reading.of(number, size, n_host) for reading in readings]
            for name, measure in measurements().items() if found else ():
                columns[name][index] = np.mean([float(measure(reading)) for reading in found])
            columns["healthy"][index] = finite[number]
        return columns

    def _fetched(self, seeds: list[list[nn.Parameter]]) -> tuple[list[bool], list["_Reading"]]:
        """Whether all parameters of each seed are finite, and the readings, after one transfer from
        the device."""
        sizes = [_together(_foreach_norm([p.detach() for p in own], math.inf)) for own in seeds]
        tensors = [tensor for reading in self.readings for tensor in reading.tensors()]
        host = iter(to_host([*sizes, *tensors]))
        finite = [bool(next(host).isfinite().all()) for _ in seeds]
        found = [reading.filled(host) for reading in self.readings]
        return finite, [each for each in found if not (self.scaled and each.overflowed)]


def _norms(params: list[nn.Parameter]) -> Tensor:
    """[n]: norms of the n gradients that are not None."""
    return _together(_foreach_norm([p.grad for p in params if p.grad is not None]))


def _foreach_norm(tensors: list[Tensor], order: float = 2.0) -> list[Tensor]:
    return list(torch._foreach_norm(tensors, ord=order)) if tensors else []


def _together(norms: list[Tensor]) -> Tensor:
    # A network may be spread over devices.
    return torch.stack([n.to(norms[0].device) for n in norms]) if norms else torch.empty(0)


def _total(norms: Tensor) -> Tensor:
    return torch.linalg.vector_norm(norms)


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
