"""The host of a `Body`: one network that the user's own loop trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.optim import Optimizer

from esper.api.checks import MEASURED, require
from esper.api.distributed import Processes
from esper.growth.grown_module import GrownModule
from esper.growth.sites import evaluating
from esper.leyline import ForgottenCallError
from esper.leyline.growth_settings import Snapshots
from esper.tolaria.engine.population import Evaluation, ModuleHosts


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
