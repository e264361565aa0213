"""The interface to which training reports rows, events and outcomes."""

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
    """A recorder of many rounds that can resume at a checkpoint."""

    def begin_round(self, number: int) -> None:
        """All that follows belongs to this round."""

    def timing(self, row: Mapping[str, Any]) -> None:
        """Seconds of a round: the only values that differ between equal runs."""

    def sync(self) -> dict[str, int]:
        """Write everything to disk; returns the length of each file in bytes."""


class NullRecorder:
    """Ignores everything."""

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
    """A recorder that keeps everything in lists, and passes it on to `listeners`."""

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
        """The rows, events and outcomes of one environment."""
        return History(
            rows=[row for row in self.rows if row.get("env") == env],
            events=[event for event in self.events if event.env == env],
            outcomes=[outcome for outcome in self.outcomes if outcome.env == env],
        )

    def clear(self) -> None:
        for kept in (self.rows, self.events, self.outcomes):
            kept.clear()
