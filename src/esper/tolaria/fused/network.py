"""Networks of stacked hosts with the seeds of their slots: isolation, blending, coalitions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.growth.hosts import CNNHost
from esper.leyline import IS_BLENDED, SeedStage
from esper.tolaria.fused.rows import Kind, Params, Row, stack
from esper.tolaria.fused.stacked import MAX_PIXELS, Add, cnn_block, in_windows, mlp_block, run

# The order of the seeds of a slot: by role, branches last.
ROLES = ("bypass", "residual", "branch")


@dataclass(frozen=True)
class Seed:
    """One seed with its row and that of its valve; `role` is the kind of its blueprint."""

    row: Row
    valve: Row | None
    role: str
    blueprint: int
    blend: int
    stage: SeedStage = SeedStage.GERMINATED
    alpha: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the seeds of a slot."""
        return ROLES.index(self.role), self.blueprint

    @property
    def branch(self) -> bool:
        return self.role == "branch"

    @property
    def bypass(self) -> bool:
        return self.role == "bypass"

    @property
    def isolated(self) -> bool:
        return self.stage == SeedStage.TRAINING

    @property
    def blended(self) -> bool:
        return bool(IS_BLENDED[self.stage])

    @property
    def gated(self) -> bool:
        """Does its valve act?"""
        return self.valve is not None and self.blended

    @property
    def rows(self) -> list[Row]:
        return [self.row] if self.valve is None else [self.row, self.valve]

    @property
    def trained_rows(self) -> list[Row]:
        return self.rows if self.gated else [self.row]


class _Read(torch.autograd.Function):
    """x[rows]; only the entries at `live` pass a gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, live: Tensor) -> Tensor:
        ctx.save_for_backward(rows, live)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        rows, live = ctx.saved_tensors
        if not len(live):
            return None, None, None
        back = grads[0].new_zeros(ctx.shape)
        return back.index_copy_(0, rows[live], grads[0].index_select(0, live)), None, None


class _Merge(torch.autograd.Function):
    """x with `alpha * delta` added at `rows`, for the entries at `live`. The other entries leave x
    unchanged bit for bit, and get the gradient as if they were added in full."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, rows: Tensor, live: Tensor, alpha: Tensor
    ) -> Tensor:
        alpha = alpha.view(-1, *[1] * (x.dim() - 1))
        ctx.save_for_backward(rows, alpha)
        scaled = delta.index_select(0, live) * alpha.index_select(0, live)
        return x.index_add(0, rows.index_select(0, live), scaled)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, alpha = ctx.saved_tensors
        return grads[0], grads[0].index_select(0, rows) * alpha, None, None, None


class Entries:
    """The rows of the features that seeds read or add to; isolated seeds do not add."""

    def __init__(self, rows: Sequence[int], seeds: Sequence[Seed], device: torch.device) -> None:
        live = [i for i, seed in enumerate(seeds) if not seed.isolated]
        alpha = [1.0 if seed.isolated or seed.gated else seed.alpha for seed in seeds]
        self.rows = torch.tensor(rows, dtype=torch.long, device=device)
        self.live = torch.tensor(live, dtype=torch.long, device=device)
        self.alpha = torch.tensor(alpha, device=device)

    def read(self, x: Tensor) -> Tensor:
        return _Read.apply(x, self.rows, self.live)

    def merge(self, x: Tensor, delta: Tensor) -> Tensor:
        return _Merge.apply(x, delta, self.rows, self.live, self.alpha)


class Group:
    """Seeds of one slot that run together; seeds[i] reads row rows[i] of the features.

    They are sorted by kind, branches last. Bypasses are a group of their own, which reads the input
    of the block (the rows `reads`, if those differ) and adds to the next layer. `stack_params`
    gives the parameters of a bank; it is called once for each kind, seeds first, then valves.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seeds: Sequence[Seed],
        stack_params: Callable[[list[Row]], Params],
        device: torch.device,
        reads: Sequence[int] | None = None,
    ) -> None:
        order = sorted(range(len(seeds)), key=lambda i: seeds[i].order)
        self.seeds = [seeds[i] for i in order]
        self.rows = [rows[i] for i in order]
        held: dict[Kind, list[Row]] = {}
        for seed in self.seeds:
            held.setdefault(seed.row.kind, []).append(seed.row)
        self.banks = [(kind, len(each), stack_params(each)) for kind, each in held.items()]
        self.n_residual = sum(not seed.branch for seed in self.seeds)
        self.n_residual_banks = len({s.row.kind for s in self.seeds[: self.n_residual]})
        read = self.rows if reads is None else [reads[i] for i in order]
        self.all = Entries(read, self.seeds, device)
        n = self.n_residual
        self.residual = Entries(self.rows[:n], self.seeds[:n], device)
        self.valves = [i for i, seed in enumerate(self.seeds) if seed.gated]
        if self.valves:
            gated = [self.seeds[i] for i in self.valves]
            valve_rows = [seed.valve for seed in gated if seed.valve is not None]
            self.valve_net = valve_rows[0].kind.module.get_submodule("net")
            self.valve_params = stack_params(valve_rows)
            self.valve_index = torch.tensor(self.valves, device=device)
            self.progress = torch.tensor([s.alpha for s in gated], device=device)[:, None, None]

    def run(self, features: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """What the seeds of each bank add, [n, B, ...], and the alphas of the valves [v, B, 1]."""
        read, sizes = self.all.read(features), [n for _, n, _ in self.banks]
        deltas = [
            run(kind.module, params, inputs)
            for (kind, _, params), inputs in zip(self.banks, read.split(sizes), strict=True)
        ]
        if not self.valves:
            return deltas, None
        alphas = self._valve_alphas(read.index_select(0, self.valve_index))
        every = torch.ones(len(self.seeds), alphas.shape[1], 1, device=alphas.device)
        factors = every.index_copy(0, self.valve_index, alphas).split(sizes)
        return [
            delta * factor.view(*factor.shape[:2], *[1] * (delta.dim() - 2))
            for delta, factor in zip(deltas, factors, strict=True)
        ], alphas.detach()

    def _valve_alphas(self, features: Tensor) -> Tensor:
        """The formula of `BlendValve`."""
        pooled = features.flatten(3).mean(-1) if features.dim() == 5 else features
        setting = run(self.valve_net, self.valve_params, pooled)
        return self.progress * (1.0 + (1.0 - self.progress) * (2.0 * setting - 1.0))

    def blend(self, features: Tensor) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """The features with what the seeds add, what the branches (seeds from `n_residual` on) will
        add to the output, and the alphas of the valves."""
        deltas, alphas = self.run(features)
        first_branch = self.n_residual_banks
        if first_branch:
            features = self.residual.merge(features, _join(deltas[:first_branch]))
        return features, deltas[first_branch:], alphas

    def bypass(self, features: Tensor) -> tuple[Add, Tensor | None]:
        """How a group of bypasses changes the output of the next layer, and the alphas of the
        valves."""
        deltas, alphas = self.run(features)
        delta = _join(deltas)

        def add(x: Tensor, windows: bool) -> Tensor:
            return self.residual.merge(x, in_windows(delta) if windows else delta)

        return add, alphas


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Trunk:
    """The host between its slots. `slot_after[i]` is the slot behind block i, or None. `example` is
    an input."""

    def __init__(self, host: nn.Module, slot_modules: Sequence[str], example: Tensor) -> None:
        self.blocks = list(host.get_submodule("blocks").children())
        self.head = host.get_submodule("head")
        self.convolutional = isinstance(host, CNNHost)
        self.large = self.convolutional and example[0, 0].numel() > MAX_PIXELS
        slots = {name: slot for slot, name in enumerate(slot_modules)}
        self.slot_after = [slots.get(f"blocks.{i}") for i in range(len(self.blocks))]

    def begin(self, x: Tensor) -> Tensor:
        return x if self.convolutional else x.flatten(2)

    def block(self, index: int, params: Params, x: Tensor, add: Add | None) -> Tensor:
        if self.convolutional:
            return cnn_block(self.blocks[index], params, x, add, large=self.large)
        return mlp_block(self.blocks[index], params, x, add)

    def finish(self, params: Params, x: Tensor, add: Add | None) -> Tensor:
        out = run(self.head, params, x.flatten(3).mean(-1) if self.convolutional else x)
        return out if add is None else add(out, False)


@dataclass(frozen=True)
class _Section:
    """One block and the slot behind it.

    hosts    int[R]: the hosts whose parameters the rows use; None for each its own
    parents  the rows to take of the block's output; None for all
    group    the seeds that act then; `readers` (int[j]) are the indices, among its branches, of
             those that are added to the outputs of the net's `branches`, None for all
    bypass   reads the input of the block, and adds to the layer after the group
    """

    hosts: Tensor | None = None
    parents: Tensor | None = None
    group: Group | None = None
    readers: Tensor | None = None
    bypass: Group | None = None


class _Net:
    """Networks as a list of sections, one per block; `branches` are added to the outputs."""

    sections: list[_Section]
    branches: Entries

    def __init__(self, trunk: Trunk, host_params: Params, device: torch.device) -> None:
        self.trunk, self.host_params, self.device = trunk, host_params, device
        # The host of each row of the last features, and the row of each network; None for its own.
        self.last_hosts: Tensor | None = None
        self.last_rows: Tensor | None = None

    def _forward(self, x: Tensor) -> tuple[Tensor, dict[tuple[int, bool], Tensor]]:
        """Outputs, and for each slot with valves (of bypasses or not) the alphas they applied."""
        trunk, branches, alphas = self.trunk, [], {}
        x, add = trunk.begin(x), None
        for index, (slot, section) in enumerate(zip(trunk.slot_after, self.sections, strict=True)):
            params = self._params(trunk.blocks[index], section.hosts)
            before, x, add = x, trunk.block(index, params, x, add), None
            if slot is not None and section.bypass is not None:
                add, applied = section.bypass.bypass(before)
                if applied is not None:
                    alphas[slot, True] = applied
            if section.parents is not None:
                x = x.index_select(0, section.parents)
            if slot is not None and section.group is not None:
                x, added, applied = section.group.blend(x)
                if added:
                    delta, readers = _join(added), section.readers
                    branches.append(delta if readers is None else delta.index_select(0, readers))
                if applied is not None:
                    alphas[slot, False] = applied
        out = trunk.finish(self._params(trunk.head, self.last_hosts), x, add)
        if self.last_rows is not None:
            out = out.index_select(0, self.last_rows)
        return (self.branches.merge(out, _join(branches)) if branches else out), alphas

    def _params(self, module: nn.Module, hosts: Tensor | None) -> Params:
        if hosts is None:
            return self.host_params
        return {p: self.host_params[p].index_select(0, hosts) for p in module.parameters()}


class TrainNet(_Net):
    """Hosts 0 to n-1 with all their active seeds, for an epoch of training; `groups` and `bypasses`
    are by slot."""

    def __init__(
        self,
        trunk: Trunk,
        host_params: Params,
        groups: dict[int, Group],
        bypasses: dict[int, Group],
        device: torch.device,
    ) -> None:
        super().__init__(trunk, host_params, device)
        self.sections = [
            _Section()
            if slot is None
            else _Section(group=groups.get(slot), bypass=bypasses.get(slot))
            for slot in trunk.slot_after
        ]
        held = [groups[slot] for slot in sorted(groups)]
        rows = [row for group in held for row in group.rows[group.n_residual :]]
        seeds = [seed for group in held for seed in group.seeds[group.n_residual :]]
        self.branches = Entries(rows, seeds, device)

    def forward(self, x: Tensor) -> Tensor:
        """[n, B, ...] to the outputs of the networks [n, B, outputs]."""
        return self._forward(x)[0]


class CoalitionNet(_Net):
    """K networks: host `hosts[k]` with those of its blended seeds for which `present[k]` is True.

    `seeds[h][s]` is the seed of host h in slot s, or None. Networks share rows of features until
    the first slot in which they differ.
    """

    def __init__(
        self,
        trunk: Trunk,
        host_params: Params,
        seeds: Sequence[Sequence[Seed | None]],
        hosts: np.ndarray,
        present: np.ndarray,
        device: torch.device,
    ) -> None:
        super().__init__(trunk, host_params, device)
        self.seeds, self.hosts, self.present = seeds, hosts, present
        # While planning: the row of the current block of each network, and the host of each row.
        self._rows, self._row_hosts = hosts, np.arange(len(seeds))
        self._branches: list[tuple[int, Seed]] = []
        # For each (host, slot) with a valve, in the complete network: is it a bypass, and the index
        # of the valve in its group.
        self.valve_of: dict[tuple[int, int], tuple[bool, int]] = {}
        self.sections = [self._plan(slot) for slot in trunk.slot_after]
        self.last_hosts = torch.tensor(self._row_hosts, device=device)
        self.last_rows = torch.tensor(self._rows, device=device)
        rows, branches = [k for k, _ in self._branches], [seed for _, seed in self._branches]
        self.branches = Entries(rows, branches, device)

    def _plan(self, slot: int | None) -> _Section:
        """The next block and the slot behind it. Networks of one row continue in two rows if they
        differ in whether the slot's seed adds to the features (or, for a bypass, to the next
        layer); a branch does not divide them."""
        n_hosts = len(self.seeds)
        before = torch.tensor(self._row_hosts, device=self.device)
        if slot is None:
            return _Section(before)
        acting = {
            host: seed
            for host, held in enumerate(self.seeds)
            if (seed := held[slot]) is not None and seed.blended
        }
        has_branch = np.array([h in acting and acting[h].branch for h in range(n_hosts)])
        has_other = np.array([h in acting and not acting[h].branch for h in range(n_hosts)])
        adds = self.present[:, slot] & has_other[self.hosts]
        with_branch = np.flatnonzero(self.present[:, slot] & has_branch[self.hosts])
        # Sorted: the rows of the next block have the order of those they come from.
        codes, self._rows = np.unique(self._rows * 2 + adds, return_inverse=True)
        parents, same = codes // 2, np.arange(len(self._row_hosts))
        self._row_hosts = self._row_hosts[parents]
        fork = None if np.array_equal(parents, same) else torch.tensor(parents, device=self.device)
        rows = sorted({*np.flatnonzero(codes % 2).tolist(), *self._rows[with_branch].tolist()})
        held = {row: acting[int(self._row_hosts[row])] for row in rows}
        ahead = {row: seed for row, seed in held.items() if seed.bypass}
        bypass = None
        if ahead:
            reads = parents[list(ahead)].tolist()
            bypass = Group(list(ahead), list(ahead.values()), stack, self.device, reads)
            self._note_valves(slot, bypass, bypass=True)
        here = {row: seed for row, seed in held.items() if not seed.bypass}
        if not here:
            return _Section(before, fork, bypass=bypass)
        group = Group(list(here), list(here.values()), stack, self.device)
        self._note_valves(slot, group, bypass=False)
        index = {row: i for i, row in enumerate(group.rows[group.n_residual :])}
        self._branches += [(k, acting[int(self.hosts[k])]) for k in with_branch.tolist()]
        readers = [index[row] for row in self._rows[with_branch].tolist()]
        return _Section(before, fork, group, torch.tensor(readers, device=self.device), bypass)

    def _note_valves(self, slot: int, group: Group, *, bypass: bool) -> None:
        index = {group.rows[i]: valve for valve, i in enumerate(group.valves)}
        for k in np.flatnonzero(self.present.all(axis=1)).tolist():
            if int(self._rows[k]) in index:
                self.valve_of[int(self.hosts[k]), slot] = bypass, index[int(self._rows[k])]

    def forward(self, x: Tensor) -> tuple[Tensor, dict[tuple[int, bool], Tensor]]:
        """The same batch [B, ...] for all: outputs [K, B, outputs], and for each slot with valves
        (of bypasses or not) the alphas they applied [v, B, 1]."""
        return self._forward(x.expand(len(self.seeds), *x.shape))
