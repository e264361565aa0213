"""A network of stacked hosts with the seeds of its slots: isolation, blending, forks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.growth.hosts.cnn import CNNHost
from esper.leyline import IS_BLENDED, SeedStage
from esper.tolaria.fused.rows import Kind, Params, Row
from esper.tolaria.fused.stacked import Add, cnn_block, in_windows, is_large, mlp_block, run

# In this order seeds of a slot stand: by kind of blueprint, branches last.
ROLES = ("bypass", "residual", "branch")


@dataclass(frozen=True)
class Seed:
    """One seed: what it is, how far it is blended in, its row and that of its valve.

    `role` is the kind of its blueprint: residual, branch or bypass.
    """

    kind: Kind
    valve_kind: Kind | None
    role: str
    blueprint: int
    blend: int
    row: Row
    valve: Row | None
    stage: SeedStage = SeedStage.GERMINATED
    alpha: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """By this seeds of a slot are sorted."""
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


class _Read(torch.autograd.Function):
    """x[rows]; of the entries only those at `live` send a gradient back."""

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
        if len(live) < len(rows):
            return back.index_copy_(0, rows[live], grads[0].index_select(0, live)), None, None
        return back.index_copy_(0, rows, grads[0]), None, None


class _Merge(torch.autograd.Function):
    """x with `alpha * delta` added at `rows`, for the entries at `live`; the others leave x alone
    bit for bit and get the gradient of being added in full."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, rows: Tensor, live: Tensor, alpha: Tensor
    ) -> Tensor:
        alpha = alpha.view(-1, *[1] * (x.dim() - 1))
        ctx.save_for_backward(rows, alpha)
        if not len(live):
            return x.clone()
        if len(live) < len(rows):
            scaled = delta.index_select(0, live) * alpha.index_select(0, live)
            return x.index_add(0, rows.index_select(0, live), scaled)
        return x.index_add(0, rows, delta * alpha)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, alpha = ctx.saved_tensors
        return grads[0], grads[0].index_select(0, rows) * alpha, None, None, None


@dataclass(frozen=True)
class Entries:
    """Where seeds add what they add: `alpha` [m] to `rows` (int[m]), isolated ones not at all."""

    rows: Tensor
    live: Tensor
    alpha: Tensor

    @staticmethod
    def of(rows: Sequence[int], seeds: Sequence[Seed], device: torch.device) -> "Entries":
        live = [i for i, seed in enumerate(seeds) if not seed.isolated]
        alpha = [1.0 if seed.isolated or seed.gated else seed.alpha for seed in seeds]
        return Entries(
            torch.tensor(rows, dtype=torch.long, device=device),
            torch.tensor(live, dtype=torch.long, device=device),
            torch.tensor(alpha, device=device),
        )

    def read(self, x: Tensor) -> Tensor:
        return _Read.apply(x, self.rows, self.live)

    def merge(self, x: Tensor, delta: Tensor) -> Tensor:
        return _Merge.apply(x, delta, self.rows, self.live, self.alpha)


Stack = Callable[[Kind, list[Row]], Params]


class Group:
    """Seeds of one slot that run together; seeds[i] reads row rows[i] of the features.

    They stand by kind, branches last; bypasses are a group of their own, which reads what comes to
    the block (the rows `reads`, if those differ) and adds to the next layer. `stack` gives the
    parameters of a bank, whose rows stand in the same order; it is called once for each kind, seeds
    first, then the valves.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seeds: Sequence[Seed],
        stack: Stack,
        device: torch.device,
        reads: Sequence[int] | None = None,
    ) -> None:
        order = sorted(range(len(seeds)), key=lambda i: seeds[i].place)
        self.seeds = [seeds[i] for i in order]
        self.rows = [rows[i] for i in order]
        self.banks: list[tuple[Kind, int, Params]] = []
        for kind in dict.fromkeys(seed.kind for seed in self.seeds):
            held = [seed.row for seed in self.seeds if seed.kind is kind]
            self.banks.append((kind, len(held), stack(kind, held)))
        self.valves = [i for i, seed in enumerate(self.seeds) if seed.gated]
        self.n_residual = sum(not seed.branch for seed in self.seeds)
        read = self.rows if reads is None else [reads[i] for i in order]
        self.all = Entries.of(read, self.seeds, device)
        split = self.n_residual
        self.residual = Entries.of(self.rows[:split], self.seeds[:split], device)
        if self.valves:
            gated = [self.seeds[i] for i in self.valves]
            assert gated[0].valve_kind is not None
            self.valve_kind = gated[0].valve_kind
            self.valve_params = stack(self.valve_kind, [s.valve for s in gated if s.valve])
            self.valve_places = torch.tensor(self.valves, device=device)
            self.progress = torch.tensor([s.alpha for s in gated], device=device)[:, None, None]

    def run(self, features: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """What each bank's seeds add, [n, B, ...], and the alphas of the valves [v, B, 1]."""
        read, sizes = self.all.read(features), [n for _, n, _ in self.banks]
        parts = read.split(sizes)
        deltas = [
            run(kind.module, params, part)
            for (kind, _, params), part in zip(self.banks, parts, strict=True)
        ]
        if not self.valves:
            return deltas, None
        alphas = self._open_valves(read.index_select(0, self.valve_places))
        every = torch.ones(len(self.seeds), alphas.shape[1], 1, device=alphas.device)
        every = every.index_copy(0, self.valve_places, alphas)
        factors = every.split(sizes)
        return [
            delta * factor.view(*factor.shape[:2], *[1] * (delta.dim() - 2))
            for delta, factor in zip(deltas, factors, strict=True)
        ], alphas.detach()

    def _open_valves(self, features: Tensor) -> Tensor:
        """The formula of `BlendValve`."""
        pooled = features.flatten(3).mean(-1) if features.dim() == 5 else features
        net = self.valve_kind.module.get_submodule("net")
        setting = run(net, self.valve_params, pooled)
        return self.progress * (1.0 + (1.0 - self.progress) * (2.0 * setting - 1.0))

    def blend(self, features: Tensor) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """The features with what the slot's seeds add, what its branches will add to the output
        (seeds from `n_residual` on, in order), and the alphas of the valves."""
        deltas, alphas = self.run(features)
        first_branch = len({seed.kind for seed in self.seeds if not seed.branch})
        if first_branch:
            features = self.residual.merge(features, _join(deltas[:first_branch]))
        return features, deltas[first_branch:], alphas

    def ahead(self, features: Tensor) -> tuple[Add, Tensor | None]:
        """How a group of bypasses changes what the next layer gives out, and the alphas of the
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
        blocks, head = host.get_submodule("blocks"), host.get_submodule("head")
        self.blocks, self.head = list(blocks.children()), head
        self.convolutional = isinstance(host, CNNHost)
        self.large = self.convolutional and is_large(example)
        places = {f"blocks.{i}": i for i in range(len(self.blocks))}
        after = {places[name]: slot for slot, name in enumerate(slot_modules)}
        self.slot_after = [after.get(i) for i in range(len(self.blocks))]

    def begin(self, x: Tensor) -> Tensor:
        return x if self.convolutional else x.flatten(2)

    def block(self, index: int, params: Params, x: Tensor, add: Add | None) -> Tensor:
        if self.convolutional:
            return cnn_block(self.blocks[index], params, x, add, large=self.large)
        return mlp_block(self.blocks[index], params, x, add)

    def finish(self, params: Params, x: Tensor, add: Add | None) -> Tensor:
        out = run(self.head, params, x.flatten(3).mean(-1) if self.convolutional else x)
        return out if add is None else add(out, False)


class TrainNet:
    """Hosts 0 to n-1 with all their active seeds, for an epoch of training; `bypasses` are groups
    like the others, by slot."""

    def __init__(
        self,
        trunk: Trunk,
        host_params: Params,
        groups: dict[int, Group],
        bypasses: dict[int, Group],
        device: torch.device,
    ) -> None:
        self.trunk, self.host_params = trunk, host_params
        self.groups, self.bypasses = groups, bypasses
        slots = sorted(groups)
        rows = [row for s in slots for row in groups[s].rows[groups[s].n_residual :]]
        seeds = [seed for s in slots for seed in groups[s].seeds[groups[s].n_residual :]]
        self.branches = Entries.of(rows, seeds, device) if rows else None

    def forward(self, x: Tensor) -> Tensor:
        """[n, B, ...] to the networks' output [n, B, outputs]."""
        trunk, branches = self.trunk, []
        x, add = trunk.begin(x), None
        for index, slot in enumerate(trunk.slot_after):
            before, x, add = x, trunk.block(index, self.host_params, x, add), None
            if slot is not None and slot in self.bypasses:
                add, _ = self.bypasses[slot].ahead(before)
            if slot is not None and slot in self.groups:
                x, added, _ = self.groups[slot].blend(x)
                branches += added
        out = trunk.finish(self.host_params, x, add)
        if self.branches is not None:
            out = self.branches.merge(out, _join(branches))
        return out


@dataclass(frozen=True)
class _Stop:
    """One block and what follows it: it runs with the parameters of `hosts` (int[R]), then rows are
    taken from `parents`, then the group acts. `readers` (int[j]) are the places, among the group's
    branches, of what is added to the outputs of the net's `branches`. `bypass` reads what came to
    the block, and adds to the layer after the group."""

    hosts: Tensor
    parents: Tensor | None = None
    group: Group | None = None
    readers: Tensor | None = None
    bypass: Group | None = None


class CoalitionNet:
    """K networks, host `hosts[k]` with those of its blended seeds of which `present[k]` is True.

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
        self.trunk, self.host_params, self.device = trunk, host_params, device
        self.seeds, self.hosts, self.present = seeds, hosts, present
        # The row of the present block that each network uses, and the host of each row.
        self._state, self._row_hosts = hosts, np.arange(len(seeds))
        self._adding: list[tuple[int, Seed]] = []
        # For each (host, slot), in its complete network: is it a bypass, and the place of its valve
        # in the group.
        self.valve_of: dict[tuple[int, int], tuple[bool, int]] = {}
        self.stops = [self._plan(slot) for slot in trunk.slot_after]
        self.last_hosts = torch.tensor(self._row_hosts, device=device)
        self.state = torch.tensor(self._state, device=device)
        rows, adding = [k for k, _ in self._adding], [seed for _, seed in self._adding]
        self.branches = Entries.of(rows, adding, device) if rows else None

    def _plan(self, slot: int | None) -> _Stop:
        """The next block and the slot behind it. Networks of one row that differ in whether the
        slot's seed adds to it (or, of a bypass, to the next layer) go on in two rows; those that
        differ in a branch do not yet."""
        n_hosts = len(self.seeds)
        before = torch.tensor(self._row_hosts, device=self.device)
        if slot is None:
            return _Stop(before)
        acting = {
            host: seed
            for host, held in enumerate(self.seeds)
            if (seed := held[slot]) is not None and seed.blended
        }
        has_branch = np.array([h in acting and acting[h].branch for h in range(n_hosts)])
        parts = np.array([h in acting and not acting[h].branch for h in range(n_hosts)])
        takes = self.present[:, slot] & parts[self.hosts]
        wants = np.flatnonzero(self.present[:, slot] & has_branch[self.hosts])
        # Sorted: rows of the next block stand in the order of those they come from.
        codes, self._state = np.unique(self._state * 2 + takes, return_inverse=True)
        parents, same = codes // 2, np.arange(len(self._row_hosts))
        self._row_hosts = self._row_hosts[parents]
        fork = None if np.array_equal(parents, same) else torch.tensor(parents, device=self.device)
        rows = sorted({*np.flatnonzero(codes % 2).tolist(), *self._state[wants].tolist()})
        held = {row: acting[int(self._row_hosts[row])] for row in rows}
        ahead = {row: seed for row, seed in held.items() if seed.bypass}
        bypass = None
        if ahead:
            reads = parents[list(ahead)].tolist()
            seeds = list(ahead.values())
            bypass = Group(list(ahead), seeds, Kind.stack, self.device, reads)
            self._note_valves(slot, bypass, bypass=True)
        here = {row: seed for row, seed in held.items() if not seed.bypass}
        if not here:
            return _Stop(before, fork, bypass=bypass)
        group = Group(list(here), list(here.values()), Kind.stack, self.device)
        self._note_valves(slot, group, bypass=False)
        place = {row: i for i, row in enumerate(group.rows[group.n_residual :])}
        self._adding += [(k, acting[int(self.hosts[k])]) for k in wants.tolist()]
        readers = [place[row] for row in self._state[wants].tolist()]
        return _Stop(before, fork, group, torch.tensor(readers, device=self.device), bypass)

    def _note_valves(self, slot: int, group: Group, *, bypass: bool) -> None:
        places = {group.rows[i]: place for place, i in enumerate(group.valves)}
        for k in np.flatnonzero(self.present.all(axis=1)).tolist():
            if int(self._state[k]) in places:
                self.valve_of[int(self.hosts[k]), slot] = bypass, places[int(self._state[k])]

    def forward(self, x: Tensor) -> tuple[Tensor, dict[tuple[int, bool], Tensor]]:
        """The same batch [B, ...] for all: outputs [K, B, outputs], and for each slot with valves
        (of bypasses or not) the alphas they applied [v, B, 1]."""
        trunk, branches, alphas = self.trunk, [], {}
        x, add = trunk.begin(x.expand(len(self.stops[0].hosts), *x.shape)), None
        for index, (slot, stop) in enumerate(zip(trunk.slot_after, self.stops, strict=True)):
            params = self._params(trunk.blocks[index], stop.hosts)
            before, x, add = x, trunk.block(index, params, x, add), None
            if slot is not None and stop.bypass is not None:
                add, applied = stop.bypass.ahead(before)
                if applied is not None:
                    alphas[slot, True] = applied
            if stop.parents is not None:
                x = x.index_select(0, stop.parents)
            if slot is not None and stop.group is not None:
                x, added, applied = stop.group.blend(x)
                if added:
                    assert stop.readers is not None
                    branches.append(_join(added).index_select(0, stop.readers))
                if applied is not None:
                    alphas[slot, False] = applied
        out = trunk.finish(self._params(trunk.head, self.last_hosts), x, add)
        out = out.index_select(0, self.state)
        if self.branches is not None:
            out = self.branches.merge(out, _join(branches))
        return out, alphas

    def _params(self, module: nn.Module, hosts: Tensor) -> Params:
        return {p: self.host_params[p].index_select(0, hosts) for p in module.parameters()}
