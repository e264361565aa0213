"""What a user should hear while it can still be mended: warnings that name cause and cure.

There is one channel: `EsperWarning` through Python's warnings, which show each sentence once, and
the same sentence as an event of the run, where there is a record.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from esper.growth.sites import tensors_in
from esper.leyline import ConfigError, EpisodeOutcome, EsperWarning, History
from esper.leyline.events import Event, GovernorRollback, Warned
from esper.simic.training.policy_controller import LearnedController
from esper.tamiyo.controllers.heuristic import HeuristicController
from esper.tamiyo.controllers.static import StaticController
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.batches import DataSource
from esper.tolaria.engine.cycle import GrowthCycle

# So many epochs in a row that were rolled back are a pattern; if they are all there ever was, it
# is hopeless.
SUSPICIOUS, HOPELESS = 2, 5
# A group whose learning rate is this many times higher shows that the first group's is not usual.
SLOW = 10.0
BATCHES_LOOKED_AT = 1000


class Watch:
    """A recorder that looks at one growing network and warns; `history` gets each warning too.

    `data` is where its batches come from; None in a loop of the user's own. Raises ConfigError when
    every epoch was rolled back and going on is pointless.
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
        """Know what a run that is taken up again has told before."""
        for row in self.history.rows:
            self.plateaued |= row["plateau_epochs"] > 0
            self.rolled_back = self.rolled_back + 1 if row["rolled_back"] else 0
        for event in self.history.events:
            self.reason = event.reason if isinstance(event, GovernorRollback) else self.reason

    def say(self, message: str) -> None:
        warnings.warn(message, EsperWarning, stacklevel=2)
        self.history.event(Warned(0, self.env.step_count, message))

    def event(self, event: Event) -> None:
        if isinstance(event, GovernorRollback):
            self.reason = event.reason

    def metrics(self, row: Mapping[str, Any]) -> None:
        self.plateaued |= row["plateau_epochs"] > 0
        self.rolled_back = self.rolled_back + 1 if row["rolled_back"] else 0
        if self.rolled_back == SUSPICIOUS:
            self.say(
                f"epochs {row['step'] - 1} and {row['step']} were both undone ({self.reason}); "
                f"{self._cause()}"
            )
        if self.rolled_back == HOPELESS and row["step"] + 1 == HOPELESS:
            raise ConfigError(
                f"each of the first {HOPELESS} epochs had to be undone ({self.reason}), "
                f"so nothing is learnt; {self._cause()}"
            )

    def outcome(self, outcome: EpisodeOutcome) -> None:
        if outcome.germinated == 0 and not isinstance(self.controller, StaticController):
            self.say(f"nothing germinated: {self._why_nothing_grew(outcome.steps)}")

    def _cause(self) -> str:
        for name, batch in _not_finite(self.data) if self.data is not None else ():
            return f"batch {batch} of {name} holds values that are not finite: mend the data"
        return "look for NaN in the data, or try a lower learning rate"

    def _why_nothing_grew(self, steps: int) -> str:
        """After `steps` decisions, which is one less than epochs."""
        who = self.controller
        if not isinstance(who, HeuristicController):
            return f"the controller {who.name} chose no seed in {steps + 1} epochs; try 'heuristic'"
        first = who.config.min_epochs_before_germinate
        if steps <= first:
            return (
                f"the heuristic plants nothing in the first {first + 1} epochs, and there were "
                f"only {steps + 1}; train for longer"
            )
        if not self._rotation_fits(who.config.blueprint_rotation):
            return (
                "no blueprint that the heuristic tries fits the slots and the budget; give other "
                "slots or a larger budget"
            )
        if not self.plateaued:
            return (
                f"the score rose by more than its noise in each of {steps + 1} epochs, so there "
                "was no plateau; train for longer"
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
    """The batches, by loader and number from 1, that hold a value that is not finite."""
    loaders = {"train_loader": data.train_batches(0), "val_loader": data.val_batches()}
    for name, batches in loaders.items():
        for number, batch in enumerate(islice(batches, BATCHES_LOOKED_AT), start=1):
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(batch)):
                yield name, number


def warn_of_slow_seeds(optimizer: Optimizer) -> None:
    """Seeds get the settings of the optimiser's first group, which may be a backbone's."""
    rates = [float(group.get("lr", math.nan)) for group in optimizer.param_groups]
    if rates[0] * SLOW <= max(rates):
        warnings.warn(
            f"seeds take the learning rate of the optimiser's first group, {rates[0]:g}, and "
            f"another group has {max(rates):g}; give manage(..., seed_lr=...), or put a group with "
            "the rate meant for seeds first",
            EsperWarning,
            stacklevel=2,
        )


def warn_of_other_ground(
    controller: Controller, task: str, start: Literal["fresh", "trained"] | None = None
) -> None:
    """A learned policy knows the task that it was trained on, and of a family whether its networks
    arrived trained; it promises nothing for others. `start` is None where nobody knows."""
    if not isinstance(controller, LearnedController):
        return
    if controller.task != task:
        other = f"was trained on the task {controller.task!r}, not on {task}"
    elif controller.starts and start is not None and start not in controller.starts:
        known = " or ".join(controller.starts)
        other = f"has learnt with networks that arrive {known}, and this one is {start}"
    else:
        return
    warnings.warn(
        f"the policy {controller.name} {other}; what it has learnt may not hold here: compare it "
        "with 'heuristic'",
        EsperWarning,
        stacklevel=2,
    )
