"""What users pass to `grow`: callbacks, and a controller by name, folder or object."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.api.checks import checked
from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.growth.grown_module import GrownModule
from esper.leyline import ConfigError, EpisodeOutcome, NullRecorder
from esper.leyline.depth import Depth
from esper.leyline.events import Event
from esper.leyline.policy_card import find_policy
from esper.simic.training.checkpoint import load_state
from esper.simic.training.policy_controller import LearnedController
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.depth import DepthController
from esper.tamiyo.controllers.heuristic import HeuristicController
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.controllers.simple import EachController
from esper.tamiyo.situation import Controller

_CALLS = ("on_epoch", "on_event", "on_end")


class Callback:
    """Override the methods you need; any object with these three methods is a callback.

    They are called from the training loop, in order. An exception in one of them ends the run.
    """

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """Called after every epoch, with its row of `history`."""

    def on_event(self, event: Event) -> None:
        """Called when something happens to a seed or to the network."""

    def on_end(self, outcome: EpisodeOutcome) -> None:
        """Called once, at the end, with the outcome of the run."""


class Caller(NullRecorder):
    """A recorder that calls callbacks. Raises ConfigError for objects that are no callbacks."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            missing = [name for name in _CALLS if not callable(getattr(callback, name, None))]
            if missing:
                raise ConfigError(
                    f"the callback {type(callback).__name__} has no method {missing[0]}; derive it "
                    "from esper.Callback"
                )
        self.callbacks = callbacks

    def metrics(self, row: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_epoch(row)

    def event(self, event: Event) -> None:
        for callback in self.callbacks:
            callback.on_event(event)

    def end(self, outcome: EpisodeOutcome) -> None:
        for callback in self.callbacks:
            callback.on_end(outcome)


PRETRAINED = "pretrained"


DEFAULT = "heuristic"


def find_controller(
    controller: str | Controller,
    num_slots: int | None = None,
    catalogue: BlueprintCatalogue | None = None,
    slots: Any = None,
) -> Controller:
    """A controller by name, by the folder of a training run or of an exported policy, or as
    `pretrained` or `pretrained:NAME` for one that comes with the package. Objects are returned as
    they are. If `slots` are a Depth, the default controller is the one that this describes.

    Raises ConfigError if there is no controller of that name, or if a learned one does not fit the
    given number of slots or catalogue.
    """
    if isinstance(slots, Depth) and controller == DEFAULT:
        return DepthController.of(slots)
    chosen = _named(controller) if isinstance(controller, str) else controller
    if isinstance(chosen, LearnedController) and num_slots is not None and catalogue is not None:
        chosen.check_fit(num_slots, catalogue)
    if isinstance(slots, Depth) and isinstance(chosen, HeuristicController | EachController):
        raise ConfigError(
            f"the controller {chosen.name!r} chooses seeds by their blueprints, and growth in "
            "depth has only blocks; leave it out, and esper.Depth(when=...) decides"
        )
    if slots is not None and not isinstance(slots, Depth) and isinstance(chosen, DepthController):
        raise ConfigError(
            f"the controller {chosen.name!r} is for growth in depth; give depth=..., or another one"
        )
    return chosen


def _named(name: str) -> Controller:
    kind, colon, which = name.partition(":")
    if kind == PRETRAINED:
        folder, _ = find_policy(which if colon else None)
        return LearnedController(load_state(folder), name)
    return load_policy(name) if os.path.isdir(name) else make_controller(name)


def check_script(controller: Controller, network: GrownModule) -> None:
    """Raises ConfigError for a script with slots or blueprints that the network does not have."""
    if isinstance(controller, ScriptedController):
        controller.check_names(network.slot_config, network.catalogue)


@checked()
def load_policy(path: str | Path, *, deterministic: bool = True) -> LearnedController:
    """A controller with the policy of a training run (its newest checkpoint) or of a folder that
    `esper policies export` wrote.

    It takes the most probable actions; with `deterministic=False` it samples them.
    """
    return LearnedController.load(path, deterministic=deterministic)
