"""Warnings while a network grows, each with its cause and what to do.

Each is an `EsperWarning` and, if the run has a record, also an event of the run.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from esper.growth.outputs import tensors_in
from esper.leyline import ConfigError, EpisodeOutcome, EsperWarning, History
from esper.leyline.events import Event, GovernorRollback, Warned
from esper.simic.training.policy_controller import LearnedController
from esper.tamiyo.controllers.depth import DepthController
from esper.tamiyo.controllers.heuristic import HeuristicController
from esper.tamiyo.controllers.simple import StaticController
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.batches import DataSource
from esper.tolaria.engine.cycle import GrowthCycle

# Epochs rolled back in a row after which a user is warned; and after which a run that has had no
# other epoch ends with an error.
SUSPICIOUS, HOPELESS = 2, 5
# Warn if another group's learning rate is this many times that of the first group.
SLOW = 10.0
CHECKED_BATCHES = 1000


class GrowthWarnings:
    """A recorder that warns about problems of one growing network; `history` gets each warning too.

    `data` is the source of its batches, None in a user's own loop. Raises ConfigError when each of
    the first epochs was rolled back.
    """

    def __init__(
        self,
        history: History,
        env: GrowthCycle,
        controller: Controller,
        data: DataSource | None = None,
    ) -> None:
        self.history, self.env, self.controller, self.data = history, env, controller, data
        self.rolled_back = 0
        self.reason = ""
        self.plateaued = False

    def catch_up(self) -> None:
        """Read the history of a run that is resumed."""
        for row in self.history.rows:
            self._count(row)
        for event in self.history.events:
            self.event(event)

    def _count(self, row: Mapping[str, Any]) -> None:
        self.plateaued |= row["plateau_epochs"] > 0
        self.rolled_back = self.rolled_back + 1 if row["rolled_back"] else 0

    def warn(self, message: str) -> None:
        warnings.warn(message, EsperWarning, stacklevel=2)
        self.history.event(Warned(0, self.env.step_count, message))

    def event(self, event: Event) -> None:
        if isinstance(event, GovernorRollback):
            self.reason = event.reason

    def metrics(self, row: Mapping[str, Any]) -> None:
        self._count(row)
        if self.rolled_back == SUSPICIOUS:
            self.warn(
                f"epochs {row['step'] - 1} and {row['step']} were both rolled back "
                f"({self.reason}); {self._cause()}"
            )
        if self.rolled_back == HOPELESS and row["step"] + 1 == HOPELESS:
            raise ConfigError(
                f"each of the first {HOPELESS} epochs was rolled back ({self.reason}), "
                f"so nothing is learnt; {self._cause()}"
            )

    def outcome(self, outcome: EpisodeOutcome) -> None:
        if outcome.germinated == 0 and not isinstance(self.controller, StaticController):
            self.warn(f"no seed was planted: {self._why_nothing_grew(outcome.steps)}")

    def _cause(self) -> str:
        for name, batch in _not_finite(self.data) if self.data is not None else ():
            return f"batch {batch} of {name} has values that are not finite: correct the data"
        return "check the data for NaN, or try a lower learning rate"

    def _why_nothing_grew(self, steps: int) -> str:
        """After `steps` decisions, which is one less than epochs."""
        controller, epochs = self.controller, steps + 1
        if isinstance(controller, DepthController):
            return (
                f"the loss was still falling fast enough at this depth in all {epochs} epochs; "
                "train for longer, or give a share of the run: Depth(..., when=0.25)"
            )
        if not isinstance(controller, HeuristicController):
            return f"the controller {controller.name} chose none in {epochs} epochs; try heuristic"
        first = controller.config.min_epochs_before_germinate
        if steps <= first:
            return (
                f"the heuristic plants nothing in the first {first + 1} epochs, and there were "
                f"only {epochs}; train for longer"
            )
        if not self._rotation_fits(controller.config.blueprint_rotation):
            return (
                "no blueprint of the heuristic fits the slots and the budget; give other slots "
                "or a larger budget"
            )
        if not self.plateaued:
            return (
                f"the score rose by more than its noise in each of {epochs} epochs, so there was "
                "no plateau; train for longer"
            )
        return (
            "the score was still rising whenever a seed could have been planted; train for longer"
        )

    def _rotation_fits(self, rotation: Iterable[str]) -> bool:
        garden = self.env.garden
        names = garden.event_log.catalogue.names
        tried = np.isin(np.array(names), list(rotation))
        return bool((garden.limits.affordable & tried).any())


def _not_finite(data: DataSource) -> Iterator[tuple[str, int]]:
    """The batches with a value that is not finite: loader, and number from 1."""
    loaders = {"train_loader": data.train_batches(0), "val_loader": data.val_batches()}
    for name, batches in loaders.items():
        for number, batch in enumerate(islice(batches, CHECKED_BATCHES), start=1):
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(batch)):
                yield name, number


def warn_of_slow_seeds(optimizer: Optimizer) -> None:
    """Seeds get the settings of the optimizer's first group, which may be those of a backbone."""
    rates = [float(group.get("lr", math.nan)) for group in optimizer.param_groups]
    if rates[0] * SLOW <= max(rates) and rates[0] < max(rates):
        warnings.warn(
            f"seeds get the learning rate of the optimizer's first group, {rates[0]:g}, but "
            f"another group has {max(rates):g}; give manage(..., seed_lr=...), or put the group "
            "whose rate seeds should have first",
            EsperWarning,
            stacklevel=2,
        )


def warn_if_out_of_domain(
    controller: Controller, task: str, start: Literal["fresh", "trained"] | None = None
) -> None:
    """Warn if a learned policy was trained on another task, or only with hosts that started in
    another way (fresh or trained). `start` is None if it is not known."""
    if not isinstance(controller, LearnedController):
        return
    if controller.task != task:
        other = f"was trained on the task {controller.task!r}, not on {task}"
    elif controller.starts and start is not None and start not in controller.starts:
        known = " or ".join(controller.starts)
        other = f"was trained with networks that start {known}, and this one starts {start}"
    else:
        return
    warnings.warn(
        f"the policy {controller.name} {other}; it may not work well here: compare it with "
        "'heuristic'",
        EsperWarning,
        stacklevel=2,
    )
