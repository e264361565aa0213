"""A population of hosts behind one small protocol, and its readable form: a loop over modules."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from esper.growth import (
    BlueprintCatalogue,
    GrownModule,
    HostSnapshot,
    SlotChoice,
    add_slot_groups,
    call_model,
    evaluating,
    export,
    keyed,
    map_tensors,
    restore_snapshot,
    sync_slot_group,
    take_snapshot,
)
from esper.leyline import ConfigError, SeedStage, draw_key
from esper.tolaria.batches import Batch, DataSource
from esper.tolaria.gradients import GradientMeter
from esper.tolaria.objectives import Objective


@dataclass(frozen=True)
class HostRecipe:
    """How to make one host and train it. `build` runs with torch keyed for the environment."""

    build: Callable[[], nn.Module]
    slots: SlotChoice
    data: DataSource
    loss: Objective
    score: Objective
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    catalogue: BlueprintCatalogue
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm must be above 0 or None, got {self.max_grad_norm}")


@dataclass(frozen=True)
class TrainReadings:
    """One epoch of training: [E] and [E, S] arrays, NaN where nothing was measured.

    finite       bool[E], False if the training of a host went to NaN or infinity
    seed_finite  bool[E, S], the same for the parameters of a seed
    """

    loss: np.ndarray
    score: np.ndarray
    finite: np.ndarray
    batches: int
    samples: int
    gradient_ratio: np.ndarray
    gradient_norm: np.ndarray
    gradient_health: np.ndarray
    seed_finite: np.ndarray


@dataclass(frozen=True)
class Evaluation:
    """Validation of one host under K coalitions of its seeds: loss [K], score [K].

    `alpha` [S] is what each seed's blend applied on average with all seeds present, and
    `activation_ratio` [S] the size of its output against what it is added to, if measured.
    """

    loss: np.ndarray
    score: np.ndarray
    alpha: np.ndarray
    samples: int
    activation_ratio: np.ndarray | None = None


class Population(Protocol):
    """E hosts that are trained side by side. Slots and environments are addressed by index."""

    keys: np.ndarray

    @property
    def template(self) -> GrownModule:
        """A network to read sites, output and costs from; the same for every host."""

    def germinate(self, env: int, slot: int, blueprint: int, blend: int, key: int) -> None: ...

    def remove(self, env: int, slot: int) -> None: ...

    def set_blend(self, env: int, slot: int, stage: SeedStage, alpha: float) -> None: ...

    def train_epoch(self, running: np.ndarray, step: int) -> TrainReadings: ...

    def evaluate(self, env: int, coalitions: np.ndarray) -> Evaluation:
        """`coalitions` is bool [K, S]: which seeds are present in each."""

    def snapshot(self, env: int) -> HostSnapshot: ...

    def restore(self, env: int, snapshot: HostSnapshot) -> None: ...

    def export(self, env: int) -> nn.Module: ...


class LoopedPopulation:
    """E ordinary modules, trained one after another; works with any nn.Module.

    What a host does depends on its own key and on nothing that happens to the others.
    """

    def __init__(
        self, recipe: HostRecipe, keys: Iterable[int], device: str | torch.device = "cpu"
    ) -> None:
        self.recipe = recipe
        self.keys = np.array(list(keys), dtype=np.int64)
        self.device = torch.device(device)
        self.networks = [self._make_network(int(key)) for key in self.keys]
        self.optimizers = [self._make_optimizer(network) for network in self.networks]

    def _make_network(self, key: int) -> GrownModule:
        recipe = self.recipe
        with keyed(draw_key(key, "host")):
            host = recipe.build().to(self.device)
        if not any(p.requires_grad for p in host.parameters()):
            raise ConfigError(f"{type(host).__name__} has no trainable parameters")
        example = self._to_device(recipe.data.example())
        return GrownModule.wrap(host, recipe.slots, example, recipe.catalogue)

    def _make_optimizer(self, network: GrownModule) -> Optimizer:
        optimizer = self.recipe.optimizer(network.host_parameters())
        add_slot_groups(optimizer, network.slot_config.slot_ids)
        return optimizer

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
        sync_slot_group(self.optimizers[env], slot_id, network.seed_parameters(slot))

    def train_epoch(self, running: np.ndarray, step: int) -> TrainReadings:
        n_envs, n_slots = len(self.keys), len(self.template.sites)
        loss, score = np.full(n_envs, np.nan), np.full(n_envs, np.nan)
        gradients = np.full((3, n_envs, n_slots), np.nan)
        seed_finite = np.ones((n_envs, n_slots), dtype=bool)
        batches = samples = 0
        for env in np.flatnonzero(running).tolist():
            meter = GradientMeter(self.networks[env])
            loss[env], score[env], samples = self._train_one(env, step, meter)
            readings, batches = meter.result(), meter.batches
            gradients[:, env] = readings.ratio, readings.norm, readings.health
            seed_finite[env] = readings.finite
        ratio, norm, health = gradients
        return TrainReadings(
            loss, score, np.isfinite(loss), batches, samples, ratio, norm, health, seed_finite
        )

    def _train_one(self, env: int, step: int, meter: GradientMeter) -> tuple[float, float, int]:
        recipe, network, optimizer = self.recipe, self.networks[env], self.optimizers[env]
        key = int(self.keys[env])
        network.train()
        readings, sizes = [], []
        with keyed(draw_key(key, "noise", step)):
            for inputs, target in self._batches(
                recipe.data.train_batches(draw_key(key, "shuffle", step))
            ):
                optimizer.zero_grad(set_to_none=True)
                output = call_model(network.host, inputs)
                loss = recipe.loss(output, target)
                loss.backward()
                if recipe.max_grad_norm is not None:
                    self._clip(network, recipe.max_grad_norm)
                meter.observe()
                optimizer.step()
                with torch.no_grad():
                    readings += [loss.detach(), recipe.score(output, target)]
                sizes.append(len(target))
        # One transfer from the device per epoch.
        values = np.array(torch.stack(readings).tolist()).reshape(-1, 2)
        loss_mean, score_mean = np.average(values, axis=0, weights=sizes).tolist()
        return loss_mean, score_mean, sum(sizes)

    @staticmethod
    def _clip(network: GrownModule, max_norm: float) -> None:
        """Host and seeds apart, so that a seed can never shrink or poison the host's gradients."""
        groups = [network.host_parameters()]
        groups += [network.seed_parameters(index) for index, _ in network.each_slot()]
        for params in groups:
            if params:
                nn.utils.clip_grad_norm_(params, max_norm)

    def evaluate(self, env: int, coalitions: np.ndarray) -> Evaluation:
        recipe, network = self.recipe, self.networks[env]
        totals, samples = (
            torch.zeros(len(coalitions), 2, dtype=torch.float64, device=self.device),
            0,
        )
        with evaluating(network):
            for inputs, target in self._batches(recipe.data.val_batches()):
                for k, present in enumerate(coalitions):
                    with network.coalition(present.tolist()):
                        output = call_model(network, inputs)
                    readings = [recipe.loss(output, target), recipe.score(output, target)]
                    totals[k] += torch.stack(readings) * len(target)
                samples += len(target)
        means = (totals / samples).cpu().numpy()
        alpha = np.array([slot.applied_alpha() for _, slot in network.each_slot()])
        parity = np.array([slot.activation_ratio() for _, slot in network.each_slot()])
        return Evaluation(means[:, 0], means[:, 1], alpha, samples, parity)

    def snapshot(self, env: int) -> HostSnapshot:
        return take_snapshot(self.networks[env], self.optimizers[env])

    def restore(self, env: int, snapshot: HostSnapshot) -> None:
        restore_snapshot(self.networks[env], self.optimizers[env], snapshot)

    def export(self, env: int) -> nn.Module:
        return export(self.networks[env], self._to_device(self.recipe.data.example()))

    def _batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return ((self._to_device(x), self._to_device(y)) for x, y in batches)

    def _to_device(self, value: Any) -> Any:
        if self.device.type == "cpu":
            return value
        return map_tensors(lambda tensor: tensor.to(self.device), value)
