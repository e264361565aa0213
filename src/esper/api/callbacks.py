"""What users are told while `grow` runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from esper.leyline import ConfigError, EpisodeOutcome, NullRecorder
from esper.leyline.events import Event

_CALLS = ("on_epoch", "on_event", "on_end")


class Callback:
    """Overwrite what you need; anything with these three methods will do.

    Called from the training loop, in order; what they raise ends the run.
    """

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """After every epoch: its row of `history`."""

    def on_event(self, event: Event) -> None:
        """Whenever something happens to a seed or to the network."""

    def on_end(self, outcome: EpisodeOutcome) -> None:
        """Once, when the network that is kept has been decided on."""


class Caller(NullRecorder):
    """A recorder that passes on what it is told. Raises ConfigError for what is no callback."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            missing = [name for name in _CALLS if not callable(getattr(callback, name, None))]
            if missing:
                raise ConfigError(
                    f"the callback {type(callback).__name__} has no {missing[0]}; derive it from "
                    "esper.Callback, which has all three"
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
