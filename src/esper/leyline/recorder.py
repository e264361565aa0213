"""How training tells what happens, without knowing who listens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from esper.leyline.events import Event
from esper.leyline.reports import EpisodeOutcome


class Recorder(Protocol):
    """Called from the training loop, in order, from one thread."""

    def event(self, event: Event) -> None: ...

    def metrics(self, row: Mapping[str, Any]) -> None:
        """One flat row per environment step (or per round); `None` is not measured."""

    def outcome(self, outcome: EpisodeOutcome) -> None: ...


class RoundRecorder(Recorder, Protocol):
    """A recorder of many rounds, whose record can be taken up again where a checkpoint was made."""

    def begin_round(self, number: int) -> None:
        """What follows happened in this round."""

    def timing(self, row: Mapping[str, Any]) -> None:
        """Seconds that a round took: the only thing that differs between equal runs."""

    def sync(self) -> dict[str, int]:
        """Make what was told so far last; gives the length of each file in bytes."""


class NullRecorder:
    """Listens to nothing."""

    def begin_round(self, number: int) -> None:
        pass

    def timing(self, row: Mapping[str, Any]) -> None:
        pass

    def sync(self) -> dict[str, int]:
        return {}

    def event(self, event: Event) -> None:
        pass

    def metrics(self, row: Mapping[str, Any]) -> None:
        pass

    def outcome(self, outcome: EpisodeOutcome) -> None:
        pass


@dataclass
class History:
    """A recorder that remembers, and passes on to others."""

    listeners: Sequence[Recorder] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    outcomes: list[EpisodeOutcome] = field(default_factory=list)

    def event(self, event: Event) -> None:
        self.events.append(event)
        for listener in self.listeners:
            listener.event(event)

    def metrics(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))
        for listener in self.listeners:
            listener.metrics(row)

    def outcome(self, outcome: EpisodeOutcome) -> None:
        self.outcomes.append(outcome)
        for listener in self.listeners:
            listener.outcome(outcome)

    def of(self, env: int) -> "History":
        """What was told of one environment."""
        return History(
            rows=[row for row in self.rows if row.get("env") == env],
            events=[event for event in self.events if event.env == env],
            outcomes=[outcome for outcome in self.outcomes if outcome.env == env],
        )

    def clear(self) -> None:
        """Forget what was told so far."""
        self.rows.clear()
        self.events.clear()
        self.outcomes.clear()
