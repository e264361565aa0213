"""The host of a body: one network whose epochs somebody else trains."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from esper.api.checks import MEASURED, require
from esper.growth.export import export
from esper.growth.grown_module import GrownModule
from esper.growth.optimizer import forget, sync_slot_group
from esper.growth.output_scale import scale_output
from esper.growth.sites import evaluating
from esper.growth.snapshot import HostSnapshot, restore_snapshot, take_snapshot
from esper.leyline import ForgottenCallError, SeedStage
from esper.tolaria.engine.population import Evaluation


class AttachedHost:
    """`Hosts` with one host, which the user's own `evaluate` evaluates.

    reported       loss and score of the complete network as the user has measured them
    alphas_known   the blends that the complete network applies were seen meanwhile
    asking         the network is being evaluated with seeds taken out
    """

    def __init__(
        self, network: GrownModule, evaluate: Callable[[], float], example: Any, key: int
    ) -> None:
        self.network, self.user_evaluate, self.example = network, evaluate, example
        self.keys = np.array([key], dtype=np.int64)
        self.optimizer: Optimizer | None = None
        self.reported: tuple[float, float] | None = None
        self.alphas_known = self.asking = False

    @property
    def template(self) -> GrownModule:
        return self.network

    def managed(self) -> Optimizer:
        if self.optimizer is None:
            raise ForgottenCallError(
                "no optimiser is managed: call body.manage(optimizer) before the first epoch, "
                "or new parameters would never be trained"
            )
        return self.optimizer

    def germinate(self, env: int, slot: int, blueprint: int, blend: int, key: int) -> None:
        self.network.germinate(slot, blueprint, blend, key)
        self._sync(slot)

    def remove(self, env: int, slot: int) -> None:
        self.network.remove(slot)
        self._sync(slot)

    def set_blend(self, env: int, slot: int, stage: SeedStage, alpha: float) -> None:
        self.network.set_blend(slot, stage, alpha)
        self._sync(slot)

    def _sync(self, slot: int) -> None:
        params = self.network.seed_parameters(slot)
        sync_slot_group(self.managed(), self.network.sites[slot].slot_id, params)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode; of the complete network, the blends that it applies are measured."""
        with evaluating(self.network):
            if self.asking:
                yield
                return
            for _, slot in self.network.each_slot():
                slot.applied_alpha()  # forgets those of earlier weights
            with self.network.coalition([True] * len(self.network.sites)):
                yield
        self.alphas_known = True

    def evaluate(self, envs: np.ndarray, present: np.ndarray) -> Evaluation:
        """The user's evaluation of every coalition; what was just reported is not asked again."""
        loss, score = np.full((2, len(present)), np.nan)
        complete = np.asarray(present.all(axis=1))
        # The alpha that valves apply shows only in a pass over the whole network.
        has_valve = any(slot.valve is not None for _, slot in self.network.each_slot())
        known = self.reported is not None and (self.alphas_known or not has_valve)
        self.asking = True
        try:
            with evaluating(self.network):
                for k, coalition in enumerate(present):
                    if not (complete[k] and known):
                        with self.network.coalition(coalition.tolist()):
                            given = self.user_evaluate()
                            require("what evaluate() gives", given, MEASURED)
                            score[k] = float(given)
        finally:
            self.asking = False
        if self.reported is not None:
            loss[complete], score[complete] = self.reported
        self.reported, self.alphas_known = None, False
        alpha = np.array([slot.applied_alpha() for _, slot in self.network.each_slot()])
        return Evaluation(loss, score, np.tile(alpha, (len(present), 1)), samples=0)

    def snapshot(self, envs: np.ndarray) -> list[HostSnapshot]:
        return [take_snapshot(self.network, self.managed())]

    def restore(self, envs: np.ndarray, snapshots: Sequence[HostSnapshot]) -> None:
        restore_snapshot(self.network, self.managed(), snapshots[0])

    def cool(self, env: int, tau: float) -> str | None:
        reason = scale_output(self.network, self.example, tau)
        if reason is None:
            forget(self.managed())
        return reason

    def export(self, env: int) -> nn.Module:
        return export(self.network, self.example)
