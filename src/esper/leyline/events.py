"""The events of a run, one frozen dataclass for each kind of row in events.jsonl, and recorders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from esper.leyline.reports import EpisodeOutcome


@dataclass(frozen=True)
class Event:
    """`step` counts host epochs since the reset, `env` is the index of the environment. Fields are
    plain values or tuples of them."""

    env: int
    step: int

    def row(self) -> dict[str, Any]:
        """The row in events.jsonl."""
        return {"event": type(self).__name__, **vars(self)}


@dataclass(frozen=True)
class Warned(Event):
    """A warning was shown to the user."""

    message: str


@dataclass(frozen=True)
class HostStabilized(Event):
    val_loss: float


@dataclass(frozen=True)
class HostCooled(Event):
    """The output of a starved host, with `rho`, was scaled by `tau`."""

    rho: float
    tau: float


@dataclass(frozen=True)
class CoolingRefused(Event):
    """A starved host was not cooled."""

    reason: str


@dataclass(frozen=True)
class SeedEvent(Event):
    """`module` is the network's name for the module of the slot `slot_id`."""

    module: str
    slot_id: str
    blueprint: str


@dataclass(frozen=True)
class Decided(Event):
    """A decision of a learned policy before the epoch `step`.

    taken          op, slot, blueprint and blend; None where the op does not need it
    value          expected return of the rest of the episode, on the scale of its training
    supposed       slot, blueprint and blend are those it would have chosen for GERMINATE
    blocks, entries, numbers, unusual   the observation, most unusual entries first: `numbers` as
                   observed, `unusual` as normalised for the network
    heads, choices, probabilities, reasons   every choice; a masked one has no probability (None)
                   but a reason
    left_out       how many more choices and entries there were
    """

    taken: tuple[str | None, ...]
    value: float | None
    supposed: bool
    blocks: tuple[str, ...]
    entries: tuple[str, ...]
    numbers: tuple[float, ...]
    unusual: tuple[float, ...]
    heads: tuple[str, ...]
    choices: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    reasons: tuple[str, ...]
    left_out: int


@dataclass(frozen=True)
class SeedGerminated(SeedEvent):
    blend: str
    params: int


@dataclass(frozen=True)
class SeedGateEvaluated(SeedEvent):
    gate: str
    passed: bool
    target_stage: str
    checks_failed: tuple[str, ...]


@dataclass(frozen=True)
class SeedStageChanged(SeedEvent):
    from_stage: str
    to_stage: str


@dataclass(frozen=True)
class SeedEnded(SeedEvent):
    """A summary of the seed."""

    epochs_total: int
    epochs_in_stage: int
    improvement: float | None
    counterfactual: float | None
    params: int


@dataclass(frozen=True)
class SeedFossilized(SeedEnded):
    pass


@dataclass(frozen=True)
class SeedCulled(SeedEnded):
    """`reason` is controller, negative_counterfactual, blending_damage, holding_timeout, unhealthy,
    governor_rollback, unproven or audit (of a kept seed)."""

    reason: str


@dataclass(frozen=True)
class RemovalUndone(SeedEvent):
    """A kept seed is back, and the network as it was: without it the score fell by more than
    noise."""

    score_before: float
    score_without: float | None


@dataclass(frozen=True)
class GovernorSnapshot(Event):
    tensors: int
    bytes: int


@dataclass(frozen=True)
class GovernorPanic(Event):
    reason: str
    loss: float | None
    threshold: float | None
    consecutive_panics: int


@dataclass(frozen=True)
class GovernorRollback(Event):
    reason: str
    loss_at_panic: float | None
    loss_threshold: float | None
    consecutive_panics: int
    restored_step: int
    culprit_modules: tuple[str, ...]
    culprit_slots: tuple[str, ...]


@dataclass(frozen=True)
class RewardHackingSuspected(SeedEvent):
    """A seed's contribution does not match the network's improvement since germination.

    pattern 'ransomware' (severity 'critical'): the network depends on the seed and got worse;
    pattern 'disproportion' (severity 'warning'): it contributes many times the improvement.
    """

    pattern: str
    severity: str
    contribution: float
    total_improvement: float
    ratio: float | None


@dataclass(frozen=True)
class AnomalyDetected(Event):
    """About the policy that all environments share: `env` is -1 and `step` counts updates. `detail`
    is the measured value and its limit."""

    anomaly: str
    detail: str
    worst_head: str | None = None


@dataclass(frozen=True)
class ShapleyComputed(Event):
    """Contributions of the seeds of one network, in pp; `standard_error` None if exact.

    `macs` is the cost of the additional evaluations.
    """

    modules: tuple[str, ...]
    slot_ids: tuple[str, ...]
    leave_one_out: tuple[float, ...]
    shapley: tuple[float, ...]
    standard_error: tuple[float, ...] | None
    evaluations: int
    macs: int


def event_from_row(row: Mapping[str, Any]) -> Event:
    """The event of a row in events.jsonl."""
    kinds: dict[str, Callable[..., Event]] = {each.__name__: each for each in _kinds(Event)}
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items() if k != "event"}
    return kinds[row["event"]](**fields)


def _kinds(kind: type[Event]) -> list[type[Event]]:
    return [kind, *(each for sub in kind.__subclasses__() for each in _kinds(sub))]


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
