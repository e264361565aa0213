"""The protocol of populations of hosts, and its simple form: a loop over ordinary modules."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.growth.devices import devices_of, keyed, on_device, to_host
from esper.growth.export import export
from esper.growth.grown_module import GrownModule
from esper.growth.optimizer import (
    add_slot_groups,
    drop_parameters,
    few_groups,
    forget,
    scaled_rates,
    sync_slot_group,
)
from esper.growth.output_scale import scale_output
from esper.growth.sites import batch_size, call_model, evaluating, explaining
from esper.growth.snapshot import HostSnapshot, Moments, restore_snapshot, take_snapshot
from esper.leyline import ConfigError, SeedStage, draw_key
from esper.leyline.growth_settings import Snapshots
from esper.tolaria.engine.batches import Batch, batch_factors
from esper.tolaria.engine.gradients import RHO_STRIDE, GradientMeter, batch_rho
from esper.tolaria.engine.objectives import WholeSetScore
from esper.tolaria.engine.recipe import HostRecipe, new_network, target_for


@dataclass(frozen=True)
class TrainReadings:
    """One epoch of training: arrays [E], NaN where nothing was measured.

    finite   bool[E], False if the training of a host went to NaN or infinity
    samples  examples that each host was trained on
    rho      see `tolaria/engine/cooling.py`
    seeds    columns of the slot table that training measures, [E, S] each
    """

    loss: np.ndarray
    score: np.ndarray
    finite: np.ndarray
    batches: int
    samples: int
    seeds: dict[str, np.ndarray]
    rho: np.ndarray

    @staticmethod
    def nothing(n_envs: int) -> "TrainReadings":
        """For hosts that were not trained."""
        loss, score, rho = np.full((3, n_envs), np.nan)
        return TrainReadings(loss, score, np.ones(n_envs, dtype=bool), 0, 0, {}, rho)


@dataclass(frozen=True)
class Evaluation:
    """Validation of K networks: loss [K] and score [K] over `samples` examples.

    `alpha` [K, S] is the mean alpha of each seed's blend in its complete network.
    """

    loss: np.ndarray
    score: np.ndarray
    alpha: np.ndarray
    samples: int


class Snapshot(Protocol):
    """The saved state of one host."""

    def all_tensors(self) -> list[Tensor]: ...


class Hosts(Protocol):
    """E hosts that can grow. Environments and slots are indices; `envs` is an int array of
    environments."""

    keys: np.ndarray

    @property
    def template(self) -> GrownModule:
        """A network with the sites, output and costs that all hosts have."""

    def germinate(self, env: int, slot: int, blueprint: int, blend: int, key: int) -> None: ...

    def remove(self, env: int, slot: int) -> None: ...

    def set_blend(self, env: int, slot: int, stage: SeedStage, alpha: float) -> None: ...

    def evaluate(self, envs: np.ndarray, present: np.ndarray) -> Evaluation:
        """Evaluate host `envs[k]` with only the seeds where `present[k]` (bool[K, S]) is True, for
        each k; a host may occur several times."""

    def snapshot(
        self,
        envs: np.ndarray,
        same_weights: Sequence[Any] | None = None,
        *,
        moments: Moments = "exact",
        spare: Sequence[Tensor] = (),
    ) -> Sequence[Snapshot]:
        """Snapshots of `envs`, with the state of optimizers as `moments` says. `same_weights`, if
        given, are earlier snapshots of the same weights, None where there is none: their copies are
        shared. `spare` tensors may be written to."""

    def restore(self, envs: np.ndarray, snapshots: Sequence[Any]) -> None:
        """`snapshots` come from `snapshot`, one for each of `envs`."""

    def cool(self, env: int, tau: float) -> str | None:
        """Scale the output of the network by `tau`, in its parameters, and reset its optimizer,
        because gradients change their size. If that is not possible, nothing changes and the reason
        is returned."""


class Population(Hosts, Protocol):
    """Hosts that are trained side by side."""

    def network(self, env: int) -> GrownModule:
        """One host with its seeds as ordinary modules, read-only."""

    def train_epoch(
        self, running: np.ndarray, step: int, rates: np.ndarray | None = None
    ) -> TrainReadings:
        """Train the hosts where `running` (bool[E]) for one epoch. `rates` [E, 2] are factors on
        each host's learning rate at the start and the end of the epoch, linear in between."""


class ModuleHosts:
    """E hosts that are ordinary modules, each with an optimizer that has a group for each slot, and
    with a GradScaler in half precision.

    `snapshots` says where they are kept: `host` is CPU memory.
    """

    keys: np.ndarray
    networks: list[GrownModule]
    optimizers: list[Optimizer]
    scalers: Sequence[GradScaler] = ()
    snapshots: Snapshots = "host"

    def example(self) -> Any:
        """One input."""
        raise NotImplementedError

    @property
    def template(self) -> GrownModule:
        return self.networks[0]

    def germinate(self, env: int, slot: int, blueprint: int, blend: int, key: int) -> None:
        self.networks[env].germinate(slot, blueprint, blend, key)
        self._sync(env, slot)

    def remove(self, env: int, slot: int) -> None:
        self.networks[env].remove(slot)
        self._sync(env, slot)

    def set_blend(self, env: int, slot: int, stage: SeedStage, alpha: float) -> None:
        network = self.networks[env]
        had_valve = network.slot(slot).valve is not None
        network.set_blend(slot, stage, alpha)
        if had_valve and network.slot(slot).valve is None:
            self._sync(env, slot)

    def _sync(self, env: int, slot: int) -> None:
        network = self.networks[env]
        slot_id = network.sites[slot].slot_id
        sync_slot_group(
            self.optimizers[env],
            slot_id,
            network.seed_parameters(slot),
            network.counterparts(slot),
        )

    def snapshot(
        self,
        envs: np.ndarray,
        same_weights: Sequence[HostSnapshot | None] | None = None,
        *,
        moments: Moments = "exact",
        spare: Sequence[Tensor] = (),
    ) -> list[HostSnapshot]:
        found = []
        same_weights = same_weights or [None] * len(envs)
        for env, earlier in zip(envs.tolist(), same_weights, strict=True):
            optimizer = None if moments == "none" else self.optimizers[env]
            network, half = self.networks[env], moments == "half"
            taken = take_snapshot(network, optimizer, self.snapshots, earlier, spare, half=half)
            used = {id(tensor) for tensor in taken.all_tensors()}
            spare = [tensor for tensor in spare if id(tensor) not in used]
            scaler = self.scalers[env].state_dict() if self.scalers else {}
            found.append(replace(taken, scaler=scaler))
        return found

    def restore(self, envs: np.ndarray, snapshots: Sequence[HostSnapshot]) -> None:
        for env, snapshot in zip(envs.tolist(), snapshots, strict=True):
            restore_snapshot(self.networks[env], self.optimizers[env], snapshot)
            if self.scalers:
                self.scalers[env].load_state_dict(snapshot.scaler)

    def cool(self, env: int, tau: float) -> str | None:
        reason = scale_output(self.networks[env], self.example(), tau)
        if reason is None:
            forget(self.optimizers[env])
        return reason

    def export(self, env: int) -> nn.Module:
        return export(self.networks[env], self.example())


def add_seed_groups(
    network: GrownModule, optimizer: Optimizer, schedulers: Iterable[Any] = (), **settings: Any
) -> None:
    """As `add_slot_groups`. Blocks that come later are taken out of the optimizer."""
    if network.stacks is not None:
        drop_parameters(optimizer, network.stacks.spare_parameters())
    slot_ids, every = network.slot_config.slot_ids, network.stacks is not None
    add_slot_groups(optimizer, slot_ids, schedulers, every=every, **settings)


class LoopedPopulation(ModuleHosts):
    """E ordinary modules, trained one after another; works with any nn.Module.

    Each host depends on its own key only, not on the other hosts.
    """

    def __init__(
        self,
        recipe: HostRecipe,
        keys: Iterable[int],
        device: str | torch.device = "cpu",
        snapshots: Snapshots = "host",
    ) -> None:
        self.recipe, self.snapshots = recipe, snapshots
        self.keys = np.array(list(keys), dtype=np.int64)
        self.device = torch.device(device)
        self.networks = [new_network(recipe, int(key), self.device) for key in self.keys]
        self.optimizers = []
        for network in self.networks:
            with network.given_back():
                self.optimizers.append(recipe.optimizer(network.host_parameters()))
                add_seed_groups(network, self.optimizers[-1])
                if recipe.precision == "fp16":
                    self._check_parameters()
        if recipe.precision == "fp16":
            self.scalers = [GradScaler(self.device.type) for _ in self.keys]

    def _check_parameters(self) -> None:
        types = {str(p.dtype).removeprefix("torch.") for p in self.template.host_parameters()}
        if "float16" in types:
            raise ConfigError(
                "precision fp16 needs parameters in float32, and the model has some in float16; "
                "call model.float() first"
            )

    def example(self) -> Any:
        return self.recipe.data.example()

    def train_epoch(
        self, running: np.ndarray, step: int, rates: np.ndarray | None = None
    ) -> TrainReadings:
        loss, score, rho = np.full((3, len(self.keys)), np.nan)
        meters = [GradientMeter(network) for network in self.networks]
        samples = 0
        for env in np.flatnonzero(running).tolist():
            rate = np.ones(2) if rates is None else rates[env]
            means, samples = self._train_one(env, step, meters[env], rate)
            loss[env], score[env], rho[env] = means
        columns = [meter.result() for meter in meters]
        seeds = {name: np.stack([column[name] for column in columns]) for name in columns[0]}
        batches = max(meter.batches for meter in meters)
        return TrainReadings(loss, score, np.isfinite(loss), batches, samples, seeds, rho)

    def _train_one(
        self, env: int, step: int, meter: GradientMeter, rates: np.ndarray
    ) -> tuple[tuple[float, float, float], int]:
        """Loss, score and rho of the epoch, and its examples."""
        recipe, network, optimizer = self.recipe, self.networks[env], self.optimizers[env]
        key = int(self.keys[env])
        network.train()
        host = network.host_parameters()
        seeds = [network.seed_parameters(index) for index, _ in network.each_slot()]
        # Host and seeds are clipped separately, so that a seed cannot shrink the host's gradients.
        groups = [params for params in (host, *seeds) if params]
        trained = [param for params in groups for param in params]
        scaler = self.scalers[env] if self.scalers else None
        readings, sizes, rhos = list[Tensor](), list[int](), list[Tensor]()
        scheduled = bool((rates != 1.0).any())
        batches = recipe.data.size().batches if scheduled else None
        with (
            keyed(draw_key(key, "noise", step), devices_of(network)),
            few_groups(optimizer),
            scaled_rates(optimizer) if scheduled else nullcontext() as scale,
        ):
            for inputs, target in self._batches(
                recipe.data.train_batches(draw_key(key, "shuffle", step))
            ):
                with explaining(f"training failed at batch {len(sizes) + 1} of the epoch"):
                    for param in trained:
                        param.grad = None
                    with self._casting():
                        output = call_model(network.entry, inputs)
                        target = target_for(output, target)
                        loss = recipe.loss(output, target)
                    if scaler is None:
                        loss.backward()
                    else:
                        scaler.scale(loss).backward()
                        scaler.unscale_(optimizer)
                    # Before clipping.
                    meter.observe(scaled=scaler is not None)
                    if recipe.max_grad_norm is not None:
                        for params in groups:
                            nn.utils.clip_grad_norm_(params, recipe.max_grad_norm)
                    if scale is not None:
                        scale(float(batch_factors(rates, len(sizes), batches)))
                    if scaler is None:
                        optimizer.step()
                    else:
                        scaler.step(optimizer)
                        scaler.update()
                    with torch.no_grad():
                        readings += _together(loss.detach(), recipe.score(output, target))
                        if len(sizes) % RHO_STRIDE == 0:
                            rhos.append(batch_rho(recipe.loss, output, target))
                sizes.append(batch_size(inputs))
        for param in trained:
            param.grad = None  # its memory is free for the snapshots
        # One transfer from the device per epoch.
        measured, rho = to_host([torch.stack(readings), torch.stack(rhos).mean()])
        values, weights = np.array(measured.tolist()).reshape(-1, 2), np.array(sizes)
        if scaler is not None:
            # Steps that overflow are skipped, so they are no sign of damage.
            finite = np.isfinite(values[:, 0])
            if finite.any():
                values, weights = values[finite], weights[finite]
        loss_mean, score_mean = np.average(values, axis=0, weights=weights).tolist()
        return (loss_mean, score_mean, float(rho)), sum(sizes)

    def evaluate(self, envs: np.ndarray, present: np.ndarray) -> Evaluation:
        means, alpha, samples = np.empty((len(envs), 2)), np.empty(present.shape), 0
        for env in np.unique(envs).tolist():
            rows = np.flatnonzero(envs == env)
            means[rows], alpha[rows], samples = self._evaluate_one(env, present[rows])
        return Evaluation(means[:, 0], means[:, 1], alpha, samples)

    def _evaluate_one(self, env: int, present: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Mean loss and score [K, 2] of the coalitions, the alphas applied [S], and the samples."""
        recipe, network = self.recipe, self.networks[env]
        readings, sizes = list[Tensor](), list[int]()
        whole = recipe.score if isinstance(recipe.score, WholeSetScore) else None
        tallies = [] if whole is None else [whole.tally() for _ in present]
        with evaluating(network), self._casting(), explaining("validation failed"):
            for inputs, target in self._batches(recipe.data.val_batches()):
                for k, coalition in enumerate(present):
                    with network.coalition(coalition.tolist()):
                        output = call_model(network, inputs)
                    target = target_for(output, target)
                    loss, score = recipe.loss(output, target), recipe.score(output, target)
                    readings += _together(loss, score)
                    if tallies:
                        tallies[k].add(output, target)
                sizes.append(batch_size(inputs))
        alpha = np.array([slot.applied_alpha() for _, slot in network.each_slot()])
        # One transfer from the device.
        (measured,) = to_host([torch.stack(readings)])
        totals, samples = np.zeros((len(present), 2)), sum(sizes)
        for values, size in zip(measured.view(len(sizes), -1, 2), sizes, strict=True):
            totals += (values * size).double().numpy()
        means = totals / samples
        if tallies:
            with explaining("the score failed"):
                means[:, 1] = [tally.result() for tally in tallies]
        return means, alpha, samples

    def network(self, env: int) -> GrownModule:
        return self.networks[env]

    def _casting(self) -> AbstractContextManager[None]:
        """Autocast if the recipe says so; else an autocast of the caller stays in effect."""
        if self.recipe.precision == "fp32":
            return nullcontext()
        half = torch.float16 if self.recipe.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, half)

    def _batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return ((on_device(x, self.device), on_device(y, self.device)) for x, y in batches)


def _together(loss: Tensor, score: Tensor) -> list[Tensor]:
    """Both on one device: the user's score may be on the CPU."""
    return [loss, score.to(loss.device)]
