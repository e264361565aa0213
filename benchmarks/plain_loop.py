"""A loop over hosts in its simplest form, module by module: the yardstick of `original_work.py`.

It knows nothing of what the library does to be quick. Nothing in the library uses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from esper.growth.grown_module import GrownModule
from esper.growth.hosts import CNNHost
from esper.growth.outputs import map_tensors
from esper.growth.sites import call_model
from esper.growth.slot_table import measurements
from esper.growth.snapshot import HostSnapshot, SeedSnapshot
from esper.leyline import IS_BLENDED, draw_key
from esper.tolaria.engine.gradients import GradientMeter
from esper.tolaria.engine.population import LoopedPopulation, TrainReadings


class PlainCNNHost(CNNHost):
    """ReLU before the pooling, and whatever layout the input has."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for block in self.blocks:
            last = [layer for layer in block if isinstance(layer, nn.MaxPool2d)]
            layers = [layer for layer in block if not isinstance(layer, nn.MaxPool2d)] + last
            for place, layer in enumerate(layers):
                block[place] = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(dim=(2, 3)))


@contextmanager
def keyed(key: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(key)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class PlainMeter(GradientMeter):
    """Norms tensor by tensor."""

    def __init__(self, network: GrownModule) -> None:
        super().__init__(network)
        self.measured: dict[int, list[dict[str, float]]] = {index: [] for index in self.slots}

    @torch.no_grad()
    def _measure(self, scale: Tensor | None) -> None:
        host_params = self.network.host_parameters()
        host, n_host = _norm(host_params), sum(p.numel() for p in host_params)
        for index in self.slots:
            params = self.network.seed_parameters(index)
            seed, n_seed = _norm(params), sum(p.numel() for p in params)
            ratio = seed / host * (n_host / n_seed) ** 0.5 if host >= 1e-8 and n_seed else 0.0
            alive = [p.grad is not None and 0.0 < float(p.grad.norm()) < np.inf for p in params]
            self.measured[index].append(
                {
                    "gradient_ratio": min(ratio, 10.0),
                    "gradient_norm": seed,
                    "gradient_health": sum(alive) / len(alive),
                }
            )

    def result(self) -> dict[str, np.ndarray]:
        n_slots = len(self.network.sites)
        columns = {name: np.full(n_slots, np.nan) for name in measurements()}
        columns["healthy"] = np.ones(n_slots, dtype=bool)
        for index, found in self.measured.items():
            for name in found[0] if found else ():
                columns[name][index] = np.mean([each[name] for each in found])
        return columns


def _norm(params: list[nn.Parameter]) -> float:
    grads = [p.grad for p in params if p.grad is not None]
    return float(get_total_norm(grads)) if grads else 0.0


class PlainPopulation(LoopedPopulation):
    def train_epoch(
        self, running: np.ndarray, step: int, rates: np.ndarray | None = None
    ) -> TrainReadings:
        loss, score, rho = np.full((3, len(self.keys)), np.nan)
        meters = [PlainMeter(network) for network in self.networks]
        samples = 0
        for env in np.flatnonzero(running).tolist():
            loss[env], score[env], samples = self._train_plainly(env, step, meters[env])
        columns = [meter.result() for meter in meters]
        seeds = {name: np.stack([column[name] for column in columns]) for name in columns[0]}
        batches = max(meter.batches for meter in meters)
        return TrainReadings(loss, score, np.isfinite(loss), batches, samples, seeds, rho)

    def _train_plainly(self, env: int, step: int, meter: GradientMeter) -> tuple[float, float, int]:
        recipe, network, optimizer = self.recipe, self.networks[env], self.optimizers[env]
        key = int(self.keys[env])
        network.train()
        readings, sizes = [], []
        with keyed(draw_key(key, "noise", step)):
            for inputs, target in recipe.data.train_batches(draw_key(key, "shuffle", step)):
                optimizer.zero_grad(set_to_none=True)
                output = call_model(network.host, inputs)
                loss = recipe.loss(output, target)
                loss.backward()
                meter.observe()
                if recipe.max_grad_norm is not None:
                    clip(network, recipe.max_grad_norm)
                optimizer.step()
                with torch.no_grad():
                    readings += [loss.detach(), recipe.score(output, target)]
                sizes.append(len(target))
        values = np.array(torch.stack(readings).tolist()).reshape(-1, 2)
        loss_mean, score_mean = np.average(values, axis=0, weights=sizes).tolist()
        return loss_mean, score_mean, sum(sizes)

    def _evaluate_one(self, env: int, present: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Like the original it leaves out every seed that acts, whoever reads that."""
        recipe, network, samples = self.recipe, self.networks[env], 0
        acting = [index for index, slot in network.each_slot() if IS_BLENDED[slot.stage]]
        without = ~np.eye(present.shape[1], dtype=bool)[acting]
        asked = (without[:, None] == present).all(axis=2).any(axis=1)
        coalitions = np.concatenate([present, without[~asked]])
        totals = torch.zeros(len(coalitions), 2, dtype=torch.float64)
        with evaluating(network):
            for inputs, target in recipe.data.val_batches():
                for k, coalition in enumerate(coalitions):
                    with network.coalition(coalition.tolist()):
                        output = call_model(network, inputs)
                    readings = [recipe.loss(output, target), recipe.score(output, target)]
                    totals[k] += torch.stack(readings) * len(target)
                samples += len(target)
        alpha = np.array([slot.applied_alpha() for _, slot in network.each_slot()])
        return (totals[: len(present)] / samples).numpy(), alpha, samples

    def snapshot(self, envs: np.ndarray, *_: Any, **__: Any) -> list[HostSnapshot]:
        """Like the original it copies everything, each time."""
        return [take_snapshot(self.networks[env], self.optimizers[env]) for env in envs.tolist()]


def clip(network: GrownModule, max_norm: float) -> None:
    groups = [network.host_parameters()]
    groups += [network.seed_parameters(index) for index, _ in network.each_slot()]
    for params in groups:
        if params:
            nn.utils.clip_grad_norm_(params, max_norm)


def _copies(module: nn.Module) -> dict[str, Tensor]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: _copy(tensor) for name, tensor in named.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def take_snapshot(network: GrownModule, optimizer: Optimizer) -> HostSnapshot:
    return HostSnapshot(
        tensors=_copies(network.host),
        seeds={
            index: SeedSnapshot(slot.blueprint, slot.blend, slot.stage, slot.alpha, _copies(slot))
            for index, slot in network.each_slot()
            if slot.seed is not None
        },
        optimizer_states=[map_tensors(_copy, optimizer.state_dict()["state"])],
    )
