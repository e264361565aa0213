"""Everything that can happen, one frozen dataclass each: the typed payload of events.jsonl."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """`step` counts host epochs from the reset, `env` the environments of the run."""

    env: int
    step: int

    def row(self) -> dict[str, Any]:
        """As it stands in events.jsonl."""
        return {"event": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class Warned(Event):
    """The user was warned, in these words."""

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
    """A starved host was not cooled, for this reason."""

    reason: str


@dataclass(frozen=True)
class SeedEvent(Event):
    """`module` is the network's own name for the place that `slot_id` stands for."""

    module: str
    slot_id: str
    blueprint: str


@dataclass(frozen=True)
class Decided(Event):
    """What a learned policy saw and thought before it decided; the epoch `step` showed what came
    of it. Rows of equal length, by the names of things:

    taken          op, slot, blueprint and blend; None where the op does not need it
    value          what it expected of the rest of the episode, on the scale that it learnt with
    supposed       slot, blueprint and blend are those that it would have taken, had it germinated
    blocks, entries, numbers, unusual   what it saw: most unusual first. `numbers` is as observed,
                   `unusual` as it reached the network
    heads, choices, probabilities, reasons   every choice; what the mask forbade has no
                   probability (None) and a reason
    left_out       how many choices and entries there were beyond these
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
    """The life of a seed, summed up when it is decided."""

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
    """`reason` is one of CULL_REASONS."""

    reason: str


CULL_REASONS = (
    "controller",
    "negative_counterfactual",
    "blending_damage",
    "holding_timeout",
    "unhealthy",
    "governor_rollback",
    "unproven",
)


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
    """A seed's contribution does not fit what the network gained since its germination.

    pattern 'ransomware' (severity 'critical'): the network depends on the seed and got worse;
    pattern 'disproportion' (severity 'warning'): it contributes many times what was gained.
    """

    pattern: str
    severity: str
    contribution: float
    total_improvement: float
    ratio: float | None


@dataclass(frozen=True)
class LearningEvent(Event):
    """About the policy that all environments share: `env` is -1 and `step` counts updates."""


@dataclass(frozen=True)
class AnomalyDetected(LearningEvent):
    """`anomaly` is one of ANOMALIES, `detail` says what was measured against which limit."""

    anomaly: str
    detail: str
    worst_head: str | None = None


ANOMALIES = (
    "ratio_explosion",
    "ratio_collapse",
    "value_collapse",
    "numerical_instability",
    "entropy_collapse",
    "entropy_low",
    "kl_extreme",
    "kl_spike",
    "gradient_norm_drift",
    "gradient_health_drift",
    "lstm_unhealthy",
)


@dataclass(frozen=True)
class ShapleyComputed(Event):
    """Contributions of the seeds of one network, in pp; `standard_error` None if exact.

    `macs` is what the evaluations of other coalitions than those already known have cost.
    """

    modules: tuple[str, ...]
    slot_ids: tuple[str, ...]
    leave_one_out: tuple[float, ...]
    shapley: tuple[float, ...]
    standard_error: tuple[float, ...] | None
    evaluations: int
    macs: int


def event_from_row(row: Mapping[str, Any]) -> Event:
    """The event that a row of events.jsonl tells of."""
    kinds: dict[str, Callable[..., Event]] = {each.__name__: each for each in _kinds(Event)}
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items() if k != "event"}
    return kinds[row["event"]](**fields)


def _kinds(kind: type[Event]) -> list[type[Event]]:
    return [kind, *(each for sub in kind.__subclasses__() for each in _kinds(sub))]
