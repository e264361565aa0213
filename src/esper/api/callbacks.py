"""Callbacks: calls to user code while `grow` runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from esper.leyline import ConfigError, EpisodeOutcome, NullRecorder
from esper.leyline.events import Event

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
