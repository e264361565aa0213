"""The host of a `Body`: one network that the user's own loop trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from esper.api.checks import MEASURED, require
from esper.api.distributed import Processes
from esper.growth.grown_module import GrownModule
from esper.growth.seed_slot import SeedSlot
from esper.growth.sites import evaluating, explaining, inner
from esper.leyline import ConfigError, ForgottenCallError
from esper.leyline.growth_settings import Snapshots
from esper.tolaria.engine.population import Evaluation, ModuleHosts


class Follower:
    """Keeps an `AveragedModel` in the shape of the live network, with its seeds averaged too.

    `network` is the averaged network, with the slots of the live one.
    """

    def __init__(self, live: GrownModule, averaged: AveragedModel) -> None:
        if not isinstance(averaged, AveragedModel):
            raise ConfigError(
                f"follow takes a torch.optim.swa_utils.AveragedModel, got {type(averaged).__name__}"
            )
        module = inner(averaged.module)
        _check_copy(live, module)
        self.live, self.averaged = live, averaged
        self.averages: dict[int, AveragedModel] = {}
        self.network: GrownModule
        self.whole = isinstance(module, GrownModule)
        if isinstance(module, GrownModule):
            self.network = module
        else:
            self.network = GrownModule(
                module, live.sites, live.output, live.catalogue, live.host_macs
            )
            self.update_host = averaged.update_parameters
            # Loops call it with the model, whose own parameters do not include seeds.
            averaged.update_parameters = self.update_parameters  # type: ignore[method-assign]
        self.sync()

    def update_parameters(self, model: nn.Module) -> None:
        self.update_host(self.live.host if isinstance(inner(model), GrownModule) else model)
        for index, average in self.averages.items():
            average.update_parameters(self.live.slot(index))

    def sync(self) -> None:
        """Copy seeds, stages and alphas of the live network; the average of a new seed starts with
        its current weights."""
        for index, slot in self.live.each_slot():
            mine = self.network.slot(index)
            if (mine.blueprint, mine.blend) != (slot.blueprint, slot.blend):
                self.network.remove(index)
                self.averages.pop(index, None)
                if slot.seed is not None:
                    self._plant(index, slot)
            if slot.seed is not None:
                self.network.set_blend(index, slot.stage, slot.alpha)

    def _plant(self, index: int, slot: SeedSlot) -> None:
        self.network.germinate(index, slot.blueprint, slot.blend, key=0)
        self.network.set_blend(index, slot.stage, slot.alpha)
        mine = self.network.slot(index)
        mine.load_state_dict(slot.state_dict())
        if not self.whole:
            how = ("avg_fn", "multi_avg_fn", "use_buffers")
            like: dict[str, Any] = {name: getattr(self.averaged, name) for name in how}
            own = AveragedModel(slot, **like)
            own.module = mine
            self.averages[index] = own

    @torch.no_grad()
    def start_over(self) -> None:
        """After a rollback: the average may contain the weights that broke the network."""
        self.sync()
        self.network.load_state_dict(self.live.state_dict())
        for average in (self.averaged, *self.averages.values()):
            average.n_averaged.zero_()


def _check_copy(live: GrownModule, module: nn.Module) -> None:
    host = module.host if isinstance(module, GrownModule) else module
    shapes = [[tuple(p.shape) for p in each.parameters()] for each in (live.host, host)]
    if shapes[0] != shapes[1]:
        raise ConfigError("the average is of another model: its parameters have other shapes")
    hooks = (hook for part in host.modules() for hook in part._forward_hooks.values())
    grown = any(isinstance(getattr(hook, "__self__", None), SeedSlot) for hook in hooks)
    if grown and not isinstance(module, GrownModule):
        raise ConfigError(
            "the average was made from a model that had already grown; make it before attach, or "
            "from body.model"
        )


class AttachedHost(ModuleHosts):
    """`Hosts` with one host, which the user's `evaluate` evaluates; with several processes the
    scores are means over them.

    reported       loss and score of the complete network, as the user reported them
    alphas_known   the alphas that the complete network applies have been measured since
    asking         True while the network is evaluated without some of its seeds
    """

    def __init__(
        self,
        network: GrownModule,
        evaluate: Callable[[], float],
        example: Any,
        key: int,
        processes: Processes,
        snapshots: Snapshots = "host",
    ) -> None:
        self.processes, self.snapshots = processes, snapshots
        self.network, self.user_evaluate, self.user_example = network, evaluate, example
        self.networks, self.optimizers = [network], []
        self.keys = np.array([key], dtype=np.int64)
        self.reported: tuple[float, float] | None = None
        self.alphas_known = self.asking = False

    def example(self) -> Any:
        return self.user_example

    @property
    def optimizer(self) -> Optimizer:
        if not self.optimizers:
            raise ForgottenCallError(
                "no optimizer is managed, so seeds would not be trained: call "
                "body.manage(optimizer) before the first epoch"
            )
        return self.optimizers[0]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode; also measures the alphas that the complete network applies."""
        with evaluating(self.network):
            if self.asking:
                yield
                return
            for _, slot in self.network.each_slot():
                slot.applied_alpha()  # resets the measurement
            with self.network.coalition([True] * len(self.network.sites)):
                yield
        self.alphas_known = True

    def evaluate(self, envs: np.ndarray, present: np.ndarray) -> Evaluation:
        """The user's evaluation of every coalition; reported scores are not measured again."""
        loss, score = np.full((2, len(present)), np.nan)
        complete = np.asarray(present.all(axis=1))
        # The alpha of a valve is measured in a forward pass of the complete network.
        has_valve = any(slot.valve is not None for _, slot in self.network.each_slot())
        known = self.reported is not None and (self.alphas_known or not has_valve)
        known = all(self.processes.gather(known))
        self.asking = True
        try:
            with evaluating(self.network):
                for k, coalition in enumerate(present):
                    if not (complete[k] and known):
                        with self.network.coalition(coalition.tolist()):
                            with explaining("evaluate() failed"):
                                given = self.user_evaluate()
                            require("the result of evaluate()", given, MEASURED)
                            score[k] = float(given)
        finally:
            self.asking = False
        alpha = np.array([slot.applied_alpha() for _, slot in self.network.each_slot()])
        score, alpha = self.processes.mean(score), self.processes.mean(alpha)
        if self.reported is not None:
            loss[complete], score[complete] = self.reported
        self.reported, self.alphas_known = None, False
        return Evaluation(loss, score, np.tile(alpha, (len(present), 1)), samples=0)
