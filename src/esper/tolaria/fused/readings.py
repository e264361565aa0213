"""What is read from the gradients of seeds, as `GradientMeter` does it for one network."""

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
    the `active` seeds, (environment, slot, seed), stand in their banks in this order.

    A seed and its valve count as one: in norm, in health and in clipping.
    """

    def __init__(
        self, arena: Arena, envs: Sequence[int], active: Sequence[tuple[int, int, Seed]]
    ) -> None:
        self.arena, self.active = arena, active
        self.batches = 0
        self.readings: list[tuple[np.ndarray, np.ndarray]] = []
        starts = np.cumsum([0, *(n for _, n in arena.banks)]).tolist()
        following = dict(zip((kind for kind, _ in arena.banks), starts, strict=False))
        # For each row the one with which it counts.
        owner = list(range(starts[-1]))
        self.seed_rows = []
        for _, _, seed in active:
            self.seed_rows.append(following[seed.kind])
            following[seed.kind] += 1
            if seed.gated and seed.valve_kind is not None:
                owner[following[seed.valve_kind]] = self.seed_rows[-1]
                following[seed.valve_kind] += 1
        self.host_rows = [list(envs).index(env) for env, _, _ in active]
        self.owner = torch.tensor(owner, device=arena.values.device)

    def _gather(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows).index_add_(0, self.owner, rows)

    def clip(self, gradient: Tensor, max_norm: float) -> Tensor:
        """Hosts and seeds apart, so that a seed can never shrink or poison a host's gradients."""
        _, norms = self.arena.norms(gradient)
        factor = (max_norm / (self._gather(norms.square()).sqrt() + 1e-6)).clamp(max=1.0)
        return gradient * factor[self.owner].float().index_select(0, self.arena.row)

    def observe(self, gradient: Tensor) -> None:
        """Call it for every batch; every STRIDE-th, from the first, is measured."""
        if self.active and self.batches % STRIDE == 0:
            pieces, norms = self.arena.norms(gradient)
            alive = ((pieces > 0) & pieces.isfinite()).double()
            alive = torch.zeros_like(norms).index_add_(0, self.arena.owner, alive)
            norm = self._gather(norms.square()).sqrt()
            self.readings.append((norm.cpu().numpy(), self._gather(alive).cpu().numpy()))
        self.batches += 1

    def fill(self, columns: dict[str, np.ndarray]) -> None:
        """Enter the means of the epoch into columns [E, S]."""
        if not self.readings:
            return
        norms, alive = (np.stack(each) for each in zip(*self.readings, strict=True))
        seeds = [seed for _, _, seed in self.active]
        kinds = [[s.kind] + ([s.valve_kind] if s.valve and s.valve_kind else []) for s in seeds]
        sizes = np.array([sum(kind.size for kind in held) for held in kinds])
        tensors = np.array([sum(len(kind.sizes) for kind in held) for held in kinds])
        host, norm = norms[:, self.host_rows], norms[:, self.seed_rows]
        n_host, live = self.arena.banks[0][0].size, alive[:, self.seed_rows]
        reading = GradientReading(norm, norm, host, sizes, n_host, live, tensors)
        where = tuple(np.array([(env, slot) for env, slot, _ in self.active]).T)
        for name, measure in measurements().items():
            columns[name][where] = np.mean(measure(reading), axis=0)
