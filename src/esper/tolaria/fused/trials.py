"""Trials of candidates in stacked hosts, as `tolaria/trials.py` runs them in one network."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline import draw_key
from esper.tamiyo import TrialPlan
from esper.tolaria.batches import TensorSource
from esper.tolaria.fused.network import Entries, Group, Seed, Trunk
from esper.tolaria.fused.rows import AdamW, Arena, Kind, Params, Row
from esper.tolaria.fused.stacked import Add, aligned, in_windows, run
from esper.tolaria.objectives import Objective
from esper.tolaria.trials import summed_up, trial_parts


@dataclass(frozen=True)
class CandidateBank:
    """Newborns of one blueprint in one slot: `rows[i]` is for host `hosts[i]`."""

    slot: int
    blueprint: int
    role: str
    kind: Kind
    hosts: list[int]
    rows: list[Row]

    @property
    def branch(self) -> bool:
        return self.role == "branch"


@dataclass(frozen=True)
class _Stop:
    """One block: it runs with the parameters of `hosts` (int[R]), the seeds that are there already
    act, then candidates append their rows. `readers` are the places, among the group's branches, of
    what is added to the outputs of the net's `branches`. `bypass` reads what came to the block, and
    adds to the next layer."""

    hosts: Tensor
    group: Group | None
    readers: Tensor
    banks: list[int]
    bypass: Group | None = None


class CandidateNet:
    """Hosts 0 to n-1 as they are, and for every candidate a copy of its host with it alone, which
    begins where the candidate adds what it adds.

    `seeds[h][s]` is the seed of host h in slot s, or None; `leaves[b]` are the parameters of bank
    b. Of the output's rows the first n are the hosts', those of bank b are `rows[b]`.
    """

    def __init__(
        self,
        trunk: Trunk,
        host_params: Params,
        seeds: Sequence[Sequence[Seed | None]],
        banks: Sequence[CandidateBank],
        leaves: Sequence[Params],
        device: torch.device,
    ) -> None:
        self.trunk, self.host_params, self.seeds = trunk, host_params, seeds
        self.banks, self.leaves, self.device = banks, leaves, device
        self.rows: list[list[int]] = [[] for _ in banks]
        hosts, then = list(range(len(seeds))), []
        for slot in trunk.slot_after:
            then.append(list(hosts))
            self._append([b for b in self._at(slot) if not banks[b].branch], hosts)
        self.last_hosts = self._index(hosts)
        adding: list[tuple[int, Seed]] = []
        self.stops = [
            self._plan(slot, rows, hosts, adding)
            for slot, rows in zip(trunk.slot_after, then, strict=True)
        ]
        rows, added = [row for row, _ in adding], [seed for _, seed in adding]
        self.branches = Entries.of(rows, added, device) if adding else None
        self._append([b for b, bank in enumerate(banks) if bank.branch], hosts)
        self.hosts = self._index(hosts)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def _at(self, slot: int | None) -> list[int]:
        return [b for b, bank in enumerate(self.banks) if bank.slot == slot]

    def _append(self, banks: Sequence[int], hosts: list[int]) -> None:
        for b in banks:
            self.rows[b] = list(range(len(hosts), len(hosts) + len(self.banks[b].hosts)))
            hosts += self.banks[b].hosts

    def _plan(
        self, slot: int | None, rows: list[int], hosts: list[int], adding: list[tuple[int, Seed]]
    ) -> _Stop:
        """`rows` and `hosts` are the hosts of the rows that there are at the slot, and at last."""
        nobody = self._index([])
        if slot is None:
            return _Stop(self._index(rows), None, nobody, [])
        acting = {
            host: seed
            for host, held in enumerate(self.seeds)
            if (seed := held[slot]) is not None and seed.blended
        }
        ahead = [row for row, host in enumerate(rows) if host in acting and acting[host].bypass]
        bypass = None
        if ahead:
            bypass = Group(ahead, [acting[rows[row]] for row in ahead], Kind.stack, self.device)
        here = [row for row, h in enumerate(rows) if h in acting and not acting[h].bypass]
        if not here:
            return _Stop(self._index(rows), None, nobody, self._at(slot), bypass)
        group = Group(here, [acting[rows[row]] for row in here], Kind.stack, self.device)
        place = {row: i for i, row in enumerate(group.rows[group.n_residual :])}
        # A copy that begins further on has what its host had here.
        late = [(row, h) for row, h in enumerate(hosts) if h in acting and acting[h].branch]
        adding += [(row, acting[host]) for row, host in late]
        readers = [place[row if row < len(rows) else host] for row, host in late]
        return _Stop(self._index(rows), group, self._index(readers), self._at(slot), bypass)

    def forward(self, x: Tensor) -> Tensor:
        """[n, B, ...] to the outputs [n + C, B, outputs]."""
        trunk, late = self.trunk, []
        own: list[Tensor] = []
        x, add = trunk.begin(x), None
        for index, stop in enumerate(self.stops):
            params = self._params(trunk.blocks[index], stop.hosts)
            before, x = x, trunk.block(index, params, x, add)
            add = self._ahead(stop, before)
            if stop.group is not None:
                x, added, _ = stop.group.blend(x)
                if added:
                    late.append(torch.cat(added).index_select(0, stop.readers))
            copies = [x]
            for b in stop.banks:
                bank = self.banks[b]
                base = x.detach().index_select(0, self._index(bank.hosts))
                if bank.role == "bypass":
                    copies.append(base)
                    continue
                change = run(bank.kind.module, self.leaves[b], base)
                (own if bank.branch else copies).append(change if bank.branch else base + change)
            x = torch.cat(copies) if len(copies) > 1 else x
        out = trunk.finish(self._params(trunk.head, self.last_hosts), x, add)
        if self.branches is not None:
            out = self.branches.merge(out, torch.cat(late))
        base = out.detach()
        branches = [bank.hosts for bank in self.banks if bank.branch]
        ends = [base[hosts] + change for hosts, change in zip(branches, own, strict=True)]
        return torch.cat([out, *ends])

    def _ahead(self, stop: _Stop, x: Tensor) -> Add | None:
        """What bypasses that are there, and candidates for one, add to the next layer."""
        adds = [] if stop.bypass is None else [stop.bypass.ahead(x)[0]]
        for b in stop.banks:
            bank = self.banks[b]
            if bank.role == "bypass":
                base = x.detach().index_select(0, self._index(bank.hosts))
                change = run(bank.kind.module, self.leaves[b], base)
                adds.append(partial(_add_at, self._index(self.rows[b]), change))

        def add(out: Tensor, windows: bool) -> Tensor:
            for each in adds:
                out = each(out, windows)
            return out

        return add if adds else None

    def _params(self, module: nn.Module, hosts: Tensor) -> Params:
        return {p: self.host_params[p].index_select(0, hosts) for p in module.parameters()}


def _add_at(rows: Tensor, change: Tensor, out: Tensor, windows: bool) -> Tensor:
    return out.index_add(0, rows, in_windows(change) if windows else change)


class FusedTrials:
    """Trials of the candidates of n hosts with these keys, on the hosts' own data."""

    def __init__(
        self,
        net: CandidateNet,
        arena: Arena,
        data: TensorSource,
        keys: Sequence[int],
        losses: Objective,
    ) -> None:
        self.net, self.arena, self.data, self.keys, self.losses = net, arena, data, keys, losses
        self.n = len(keys)

    def train(self, plan: TrialPlan, step: int, adam: AdamW, max_norm: float | None) -> int:
        """A few steps on the candidates' parameters; gives the number of examples."""
        inputs, targets = self.data.train
        samples = 0
        for rows in self._batches(plan, step):
            output = self._forward(inputs[rows[:, aligned(rows.shape[1])]], rows.shape[1])
            target = targets[rows].to(output.device)[self.net.hosts[self.n :].cpu()]
            gradient = self.arena.gradient(self.losses(output[self.n :], target).sum())
            if max_norm is not None:
                _, norms = self.arena.norms(gradient)
                factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
                gradient = gradient * factor.float().index_select(0, self.arena.row)
            self.arena.step(gradient, adam)
            samples += rows.shape[1]
        return samples

    def _batches(self, plan: TrialPlan, step: int) -> list[Tensor]:
        """As `trial_batches` gives them: the places [n, B] of their examples."""
        found: list[Tensor] = []
        epoch = 0
        while len(found) < plan.steps:
            keys = [draw_key(key, "trial", step, epoch) for key in self.keys]
            orders = [self.data.train_order(torch.Generator().manual_seed(key)) for key in keys]
            batches = torch.stack(orders).split(self.data.batch, dim=1)[: self.data.max_batches]
            found += [piece for rows in batches for piece in rows.split(plan.batch, dim=1)]
            epoch += 1
        return found[: plan.steps]

    @torch.no_grad()
    def evaluate(self, plan: TrialPlan) -> tuple[np.ndarray, list[int]]:
        """Losses [parts, n + C] and the sizes of the parts."""
        losses, sizes = [], []
        for inputs, target in trial_parts(self.data, plan):
            size = len(target)
            output = self._forward(
                inputs[aligned(size)].expand(self.n, -1, *inputs.shape[1:]), size
            )
            targets = target.to(output.device).expand(len(output), *target.shape)
            losses.append(self.losses(output, targets))
            sizes.append(size)
        return torch.stack(losses).double().cpu().numpy(), sizes

    def _forward(self, x: Tensor, size: int) -> Tensor:
        return self.net.forward(x.to(self.arena.values.device))[:, :size]

    def gains(
        self, losses: np.ndarray, sizes: Sequence[int]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For every bank gain and error of its candidates."""
        found = []
        for bank, rows in zip(self.net.banks, self.net.rows, strict=True):
            pairs = np.stack([losses[:, bank.hosts], losses[:, rows]], axis=2)
            gain, error = summed_up(pairs, sizes)
            found.append((gain[:, 0], error[:, 0]))
        return found
