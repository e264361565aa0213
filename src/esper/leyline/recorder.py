"""How training tells what happens, without knowing who listens."""

from collections.abc import Mapping
from typing import Any, Protocol

from esper.leyline.events import Event
from esper.leyline.reports import EpisodeOutcome


class Recorder(Protocol):
    """Called from the training loop, in order, from one thread."""

    def event(self, event: Event) -> None: ...

    def metrics(self, row: Mapping[str, Any]) -> None:
        """One flat row per environment step (or per round); `None` is not measured."""

    def outcome(self, outcome: EpisodeOutcome) -> None: ...


class NullRecorder:
    """Listens to nothing."""

    def event(self, event: Event) -> None:
        pass

    def metrics(self, row: Mapping[str, Any]) -> None:
        pass

    def outcome(self, outcome: EpisodeOutcome) -> None:
        pass
