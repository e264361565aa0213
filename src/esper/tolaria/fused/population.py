"""The `Population` of hosts with stacked parameters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from esper.growth.devices import on_device
from esper.growth.grown_module import GrownModule
from esper.growth.output_scale import scale_output
from esper.growth.slot_table import GradientReading, measurements
from esper.growth.snapshot import Moments
from esper.leyline import IS_ACTIVE, IS_FULL, InvalidStateMachineError, SeedStage, draw_key
from esper.tolaria.engine.batches import TensorSource, batch_factors
from esper.tolaria.engine.gradients import RHO_STRIDE, STRIDE, can_starve, starvation
from esper.tolaria.engine.population import Evaluation, TrainReadings
from esper.tolaria.engine.recipe import HostRecipe, new_host, new_network
from esper.tolaria.fused.choice import refuse_unless_fusable
from esper.tolaria.fused.network import CoalitionNet, Group, Seed, TrainNet, Trunk
from esper.tolaria.fused.rows import Arena, Kind, Row, stack
from esper.tolaria.fused.stacked import aligned, depends_on_mode, objectives


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
        """Write the means of the epoch into columns [E, S], and which seeds are finite."""
        if not self.readings:
            return
        where = tuple(np.array([(env, slot) for env, slot, _ in self.active]).T)
        broken = self._sum_by_owner(self.arena.broken()).cpu().numpy()
        columns["healthy"][where] = broken[self.seed_rows] == 0
        # One transfer from the device.
        found = torch.stack([torch.stack(each) for each in self.readings]).cpu().double().numpy()
        norms, alive = found.transpose(1, 0, 2)
        kinds = [[row.kind for row in seed.rows] for _, _, seed in self.active]
        sizes = np.array([sum(kind.size for kind in held) for held in kinds])
        tensors = np.array([sum(len(kind.sizes) for kind in held) for held in kinds])
        host, norm = norms[:, self.host_rows], norms[:, self.seed_rows]
        n_host, live = self.arena.banks[0][0].size, alive[:, self.seed_rows]
        reading = GradientReading(norm, norm, host, sizes, n_host, live, tensors)
        for name, measure in measurements().items():
            columns[name][where] = np.mean(measure(reading), axis=0)


Active = list[tuple[int, int, Seed]]  # (environment, slot, seed)


@dataclass(frozen=True)
class FusedSnapshot:
    """The rows of one host and its seeds; rows never change, so nothing is copied. With `half` the
    moments are rounded when they are restored, as those of looped hosts."""

    host: Row
    seeds: tuple[Seed | None, ...]
    half: bool = False

    def all_tensors(self) -> list[Tensor]:
        held = [row for seed in self.seeds if seed is not None for row in seed.rows]
        return [row.values for row in (self.host, *held)]


def _rounded(seed: Seed) -> Seed:
    valve = seed.valve and seed.valve.rounded()
    return replace(seed, row=seed.row.rounded(), valve=valve)


class FusedPopulation:
    """E hosts of one architecture, trained in single kernels; agrees with `LoopedPopulation` to
    rounding. Raises ConfigError, with the reason, for a recipe that cannot be fused."""

    def __init__(
        self, recipe: HostRecipe, keys: Iterable[int], device: str | torch.device = "cpu"
    ) -> None:
        self.recipe = recipe
        self.keys = np.array(list(keys), dtype=np.int64)
        self.device = torch.device(device)
        self.template = new_network(recipe, int(self.keys[0]), self.device)
        refuse_unless_fusable(recipe, self.template)
        assert isinstance(recipe.data, TensorSource)
        self.data = recipe.data
        self.train_data = tuple(values.to(self.device) for values in self.data.train)
        self.adamw = recipe.optimizer(self.template.host_parameters()).param_groups[0]
        self.losses, self.scores = objectives(recipe.loss), objectives(recipe.score)
        self.host_kind = Kind(self.template.host)
        slot_modules = [site.module for site in self.template.sites]
        self.trunk = Trunk(self.template.host, slot_modules, self.data.example())
        self.kinds: dict[tuple[int, int], Kind] = {}  # by slot and blueprint
        self.with_modes: list[nn.Module] = []
        self.valve_kinds: dict[tuple[int, bool], Kind] = {}
        # Rows never change: hosts with the same key begin with the same row.
        rows = {
            key: self.host_kind.new_row(new_host(recipe, key, self.device))
            for key in dict.fromkeys(self.keys.tolist())
        }
        self.hosts = [rows[key] for key in self.keys.tolist()]
        n_slots = len(self.template.sites)
        self.seeds: list[list[Seed | None]] = [[None] * n_slots for _ in self.keys]

    # --- growing -------------------------------------------------------------------------------

    def germinate(self, env: int, slot: int, blueprint: int, blend: int, key: int) -> None:
        """Raises as `GrownModule.germinate` does."""
        template = self.template
        if self.seeds[env][slot] is not None:
            slot_id = template.sites[slot].slot_id
            raise InvalidStateMachineError(f"slot {slot_id} already holds a seed")
        seed, valve = template.new_seed(slot, blueprint, blend, key)
        row, valve_row = self._kind(slot, blueprint, seed).new_row(seed), None
        role = template.catalogue[blueprint].kind
        if valve is not None:
            valve_kind = self.valve_kinds.setdefault((slot, role == "bypass"), Kind(valve))
            valve_row = valve_kind.new_row(valve)
        self.seeds[env][slot] = Seed(row, valve_row, role, blueprint, blend)

    def _kind(self, slot: int, blueprint: int, seed: nn.Module) -> Kind:
        if (slot, blueprint) not in self.kinds:
            self.template.check_shape(slot, blueprint, seed)
            self.kinds[slot, blueprint] = Kind(seed)
            if depends_on_mode(seed):
                self.with_modes.append(seed)
        return self.kinds[slot, blueprint]

    def remove(self, env: int, slot: int) -> None:
        self.seeds[env][slot] = None

    def set_blend(self, env: int, slot: int, stage: SeedStage, alpha: float) -> None:
        seed = self.seeds[env][slot]
        assert seed is not None, f"slot {slot} of environment {env} is empty"
        valve = None if IS_FULL[stage] else seed.valve
        if (seed.stage, seed.alpha) != (stage, alpha) or seed.valve is not valve:
            self.seeds[env][slot] = replace(seed, stage=stage, alpha=alpha, valve=valve)

    # --- training ------------------------------------------------------------------------------

    def train_epoch(
        self, running: np.ndarray, step: int, rates: np.ndarray | None = None
    ) -> TrainReadings:
        shape = len(self.keys), len(self.template.sites)
        envs = np.flatnonzero(running).tolist()
        loss, score, rho = np.full((3, len(self.keys)), np.nan)
        seeds = {name: np.full(shape, np.nan) for name in measurements()}
        seeds["healthy"] = np.ones(shape, dtype=bool)
        sizes: list[int] = []
        if envs:
            (loss[envs], score[envs], rho[envs]), sizes = self._train(envs, step, seeds, rates)
        return TrainReadings(loss, score, np.isfinite(loss), len(sizes), sum(sizes), seeds, rho)

    def _switch(self, *, training: bool) -> None:
        for module in self.with_modes:
            module.train(training)

    def _active(self, envs: Iterable[int]) -> Active:
        """Those of a slot have the order of its group."""
        found = [
            (env, slot, seed)
            for env in envs
            for slot, seed in enumerate(self.seeds[env])
            if seed is not None and IS_ACTIVE[seed.stage]
        ]
        return sorted(found, key=lambda each: (each[1], each[2].order))

    def _train(
        self,
        envs: list[int],
        step: int,
        columns: dict[str, np.ndarray],
        rates: np.ndarray | None,
    ) -> tuple[np.ndarray, list[int]]:
        """Mean loss, score and rho of each host, [3, n], and the sizes of the batches; writes the
        readings of seeds into `columns`."""
        self._switch(training=True)
        active = self._active(envs)
        arena, net, row_envs = self._assemble(envs, active)
        row_rates = None if rates is None else rates[row_envs]
        batches = self.data.size().batches
        meter = Meter(arena, envs, active)
        keys = [draw_key(int(self.keys[env]), "shuffle", step) for env in envs]
        orders = [self.data.train_order(torch.Generator().manual_seed(key)) for key in keys]
        inputs, targets = self.train_data
        readings, sizes, rhos = [], list[int](), list[Tensor]()
        chunks = torch.stack(orders).to(self.device).split(self.data.batch, dim=1)
        for rows in chunks[: self.data.max_batches]:
            target, size = targets[rows], rows.shape[1]
            chosen = rows[:, aligned(size)]
            # Faster than `inputs[chosen]`.
            x = inputs.index_select(0, chosen.flatten()).view(*chosen.shape, *inputs.shape[1:])
            output = net.forward(x)[:, :size]
            losses = self.losses(output, target)
            gradient = arena.gradient(losses.sum())
            # Before clipping: readings are of the gradient of the loss.
            meter.observe(gradient)
            if self.recipe.max_grad_norm is not None:
                gradient = meter.clip(gradient, self.recipe.max_grad_norm)
            factors = None
            if row_rates is not None:
                factors = torch.from_numpy(batch_factors(row_rates, len(sizes), batches))
            arena.step(gradient, self.adamw, factors)
            with torch.no_grad():
                readings.append(torch.stack([losses.detach(), self.scores(output, target)]))
                if len(sizes) % RHO_STRIDE == 0:
                    rhos.append(self._rho(output.detach(), target))
            sizes.append(size)
        meter.fill(columns)
        self._store(arena, envs, active)
        values = torch.stack(readings).cpu().double().numpy()
        means = np.average(values, axis=0, weights=sizes)
        rho = torch.stack(rhos).cpu().double().mean(dim=0).numpy()
        return np.stack([*means, rho]), sizes

    def _rho(self, output: Tensor, target: Tensor) -> Tensor:
        """[n]: see `batch_rho`."""
        classes = not target.is_floating_point() and output.dim() == target.dim() + 1
        if not (classes and can_starve(self.recipe.loss)):
            return output.new_full((len(output),), torch.nan)
        return starvation(output, target)

    def _assemble(self, envs: list[int], active: Active) -> tuple[Arena, TrainNet, list[int]]:
        """The arena of hosts, active seeds and acting valves, the network that runs on it, and the
        environment of each of its rows."""
        held = [(env, self.hosts[env]) for env in envs]
        held += [(env, row) for env, _, seed in active for row in seed.trained_rows]
        banks: dict[Kind, list[tuple[int, Row]]] = {}
        for env, row in held:
            banks.setdefault(row.kind, []).append((env, row))
        arena = Arena([[row for _, row in bank] for bank in banks.values()])
        leaves = dict(zip(banks, arena.leaves, strict=True))
        index = {env: i for i, env in enumerate(envs)}
        groups: dict[bool, dict[int, Group]] = {True: {}, False: {}}
        for slot, bypass in sorted({(slot, seed.bypass) for _, slot, seed in active}):
            own = [(index[e], seed) for e, s, seed in active if (s, seed.bypass) == (slot, bypass)]
            rows, seeds = [row for row, _ in own], [seed for _, seed in own]
            groups[bypass][slot] = Group(rows, seeds, lambda r: leaves[r[0].kind], self.device)
        params = leaves[self.host_kind]
        net = TrainNet(self.trunk, params, groups[False], groups[True], self.device)
        return arena, net, [env for bank in banks.values() for env, _ in bank]

    def _store(self, arena: Arena, envs: list[int], active: Active) -> None:
        """Replace the rows that were trained."""
        new = {kind: iter(rows) for kind, rows in arena.rows().items()}
        for env in envs:
            self.hosts[env] = next(new[self.host_kind])
        for env, slot, seed in active:
            row, valve = next(new[seed.row.kind]), seed.valve
            if valve is not None and seed.gated:
                valve = next(new[valve.kind])
            self.seeds[env][slot] = replace(seed, row=row, valve=valve)

    # --- evaluating ----------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, envs: np.ndarray, present: np.ndarray) -> Evaluation:
        if not len(envs):
            return Evaluation(np.empty(0), np.empty(0), np.empty(present.shape), 0)
        self._switch(training=False)
        chosen, hosts = np.unique(envs, return_inverse=True)
        seeds = [self.seeds[env] for env in chosen.tolist()]
        params = stack([self.hosts[env] for env in chosen.tolist()])
        net = CoalitionNet(self.trunk, params, seeds, hosts, present, self.device)
        readings, sizes = list[Tensor](), list[int]()
        opened: dict[tuple[int, bool], Tensor] = {}
        for inputs, target in self.data.val_batches():
            size = len(target)
            output, alphas = net.forward(on_device(inputs[aligned(size)], self.device))
            output = output[:, :size]
            targets = on_device(target, self.device).expand(len(envs), *target.shape)
            found = [self.losses(output, targets), self.scores(output, targets)]
            readings.append(torch.stack(found, dim=1))
            for where, alpha in alphas.items():
                opened[where] = opened.get(where, torch.zeros(())) + alpha[:, :size].sum(dim=(1, 2))
            sizes.append(size)
        totals, samples = np.zeros((len(envs), 2)), sum(sizes)
        # One transfer from the device.
        for values, size in zip(torch.stack(readings).cpu(), sizes, strict=True):
            totals += (values * size).double().numpy()
        means = totals / samples
        return Evaluation(means[:, 0], means[:, 1], self._applied(net, opened, samples), samples)

    def _applied(
        self, net: CoalitionNet, opened: dict[tuple[int, bool], Tensor], samples: int
    ) -> np.ndarray:
        """[K, S]: the alpha of each seed; with a valve, its mean in the complete network."""
        alpha = np.array(
            [[0.0 if seed is None else seed.alpha for seed in held] for held in net.seeds]
        )
        means = {where: (total / samples).cpu().numpy() for where, total in opened.items()}
        for (host, slot), (bypass, valve) in net.valve_of.items():
            alpha[host, slot] = means[slot, bypass][valve]
        return alpha[net.hosts]

    # --- snapshots and export ------------------------------------------------------------------

    def snapshot(
        self,
        envs: np.ndarray,
        same_weights: Sequence[FusedSnapshot | None] | None = None,
        *,
        moments: Moments = "exact",
        spare: Sequence[Tensor] = (),
    ) -> list[FusedSnapshot]:
        """Rows are shared, not copied."""
        half = moments == "half"
        return [
            FusedSnapshot(self.hosts[env], tuple(self.seeds[env]), half) for env in envs.tolist()
        ]

    def restore(self, envs: np.ndarray, snapshots: Sequence[FusedSnapshot]) -> None:
        for env, snapshot in zip(envs.tolist(), snapshots, strict=True):
            host, seeds = snapshot.host, list(snapshot.seeds)
            if snapshot.half:
                host, seeds = host.rounded(), [seed and _rounded(seed) for seed in seeds]
            self.hosts[env], self.seeds[env] = host, seeds

    def cool(self, env: int, tau: float) -> str | None:
        network = self.network(env)
        reason = scale_output(network, self.recipe.data.example(), tau)
        if reason is None:
            self.hosts[env] = self.host_kind.new_row(network.host)
            for index, seed in enumerate(self.seeds[env]):
                slot = network.slot(index)
                if seed is not None and slot.seed is not None:
                    row, valve = seed.row.kind.new_row(slot.seed), seed.valve
                    if valve is not None and slot.valve is not None:
                        valve = valve.kind.new_row(slot.valve)
                    self.seeds[env][index] = replace(seed, row=row, valve=valve)
        return reason

    def network(self, env: int) -> GrownModule:
        """A copy of one host with its seeds as ordinary modules."""
        host = new_host(self.recipe, int(self.keys[env]), self.device)
        network = self.template.around(host)
        self.hosts[env].copy_to(network.host)
        for index, seed in enumerate(self.seeds[env]):
            if seed is None:
                continue
            network.germinate(index, seed.blueprint, seed.blend, key=0)
            network.set_blend(index, seed.stage, seed.alpha)
            slot = network.slot(index)
            assert slot.seed is not None
            seed.row.copy_to(slot.seed)
            if seed.valve is not None and slot.valve is not None:
                seed.valve.copy_to(slot.valve)
        return network
