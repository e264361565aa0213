"""Readings of seed gradients and gradient clipping, as `GradientMeter` does for one network."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from esper.growth.slot_table import GradientReading, measurements
from esper.tolaria.engine.gradients import STRIDE
from esper.tolaria.fused.network import Seed
from esper.tolaria.fused.rows import Arena


class Meter:
    """Reads and clips the gradients of an epoch. `envs` are the hosts of the arena's first bank;
    the `active` seeds, (environment, slot, seed), have this order in their banks.

    A seed and its valve count as one: in norm, health and clipping.
    """

    def __init__(
        self, arena: Arena, envs: Sequence[int], active: Sequence[tuple[int, int, Seed]]
    ) -> None:
        self.arena, self.active = arena, active
        self.batches = 0
        self.readings: list[tuple[Tensor, Tensor]] = []
        starts = np.cumsum([0, *(n for _, n in arena.banks)]).tolist()
        following = dict(zip((kind for kind, _ in arena.banks), starts, strict=False))
        # The row with which each row counts: that of its seed for a valve, else its own.
        owner = list(range(starts[-1]))
        self.seed_rows = []
        for _, _, seed in active:
            self.seed_rows.append(following[seed.row.kind])
            for row in seed.trained_rows:
                owner[following[row.kind]] = self.seed_rows[-1]
                following[row.kind] += 1
        self.host_rows = [list(envs).index(env) for env, _, _ in active]
        self.owner = torch.tensor(owner, device=arena.values.device)

    def _sum_by_owner(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows).index_add_(0, self.owner, rows)

    def clip(self, gradient: Tensor, max_norm: float) -> Tensor:
        """Hosts and seeds separately, so that a seed cannot shrink the gradients of its host."""
        _, norms = self.arena.norms(gradient)
        factor = (max_norm / (self._sum_by_owner(norms.square()).sqrt() + 1e-6)).clamp(max=1.0)
        return gradient * factor[self.owner].float().index_select(0, self.arena.row)

    def observe(self, gradient: Tensor) -> None:
        """Call it for every batch; it measures every STRIDE-th, from the first."""
        if self.active and self.batches % STRIDE == 0:
            tensors, norms = self.arena.norms(gradient)
            alive = ((tensors > 0) & tensors.isfinite()).to(norms.dtype)
            alive = torch.zeros_like(norms).index_add_(0, self.arena.owner, alive)
            norm = self._sum_by_owner(norms.square()).sqrt()
            self.readings.append((norm, self._sum_by_owner(alive)))
        self.batches += 1

    def fill(self, columns: dict[str, np.ndarray]) -> None:
        """Write the means of the epoch into columns [E, S]."""
        if not self.readings:
            return
        # One transfer from the device.
        found = torch.stack([torch.stack(each) for each in self.readings]).cpu().double().numpy()
        norms, alive = found.transpose(1, 0, 2)
        kinds = [[row.kind for row in seed.rows] for _, _, seed in self.active]
        sizes = np.array([sum(kind.size for kind in held) for held in kinds])
        tensors = np.array([sum(len(kind.sizes) for kind in held) for held in kinds])
        host, norm = norms[:, self.host_rows], norms[:, self.seed_rows]
        n_host, live = self.arena.banks[0][0].size, alive[:, self.seed_rows]
        reading = GradientReading(norm, norm, host, sizes, n_host, live, tensors)
        where = tuple(np.array([(env, slot) for env, slot, _ in self.active]).T)
        for name, measure in measurements().items():
            columns[name][where] = np.mean(measure(reading), axis=0)
