"""Tells when learning goes wrong, from the numbers of each update, and when to look closer.

One noisy update is not an anomaly: a finding counts after `patience` updates in a row, and is over
after as many without it. What cannot be noise (a NaN, an extreme KL) counts at once.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from esper.leyline import HEAD_NAMES, ConfigError
from esper.leyline import constants as c
from esper.leyline.events import AnomalyDetected

AT_ONCE = ("numerical_instability", "kl_extreme")
# The milder finding is not reported beside the graver one.
GRAVER = {"entropy_low": "entropy_collapse", "kl_spike": "kl_extreme"}

# What was looked at, by finding or 'finding:head': what is wrong with it, or None if nothing is.
Findings = dict[str, str | None]


@dataclass(frozen=True)
class AnomalyThresholds:
    """Entropies are normalised to [0, 1]; drifts are relative to the running mean."""

    ratio_max: float = c.RATIO_EXPLOSION_THRESHOLD
    ratio_min: float = c.RATIO_COLLAPSE_THRESHOLD
    entropy_collapse: float = c.ENTROPY_COLLAPSE_THRESHOLD
    entropy_low: float = c.ENTROPY_LOW_THRESHOLD
    kl_spike: float = c.KL_SPIKE_THRESHOLD
    kl_extreme: float = c.KL_EXTREME_THRESHOLD
    drift: float = c.GRADIENT_DRIFT_THRESHOLD
    value_phases: tuple[tuple[float, float], ...] = c.VALUE_COLLAPSE_PHASES
    patience: int = c.ANOMALY_PATIENCE

    def __post_init__(self) -> None:
        for low, high in (
            ("ratio_min", "ratio_max"),
            ("entropy_collapse", "entropy_low"),
            ("kl_spike", "kl_extreme"),
        ):
            if not getattr(self, low) <= getattr(self, high):
                raise ConfigError(f"{low} must not be above {high}")
        if self.patience < 1:
            raise ConfigError(f"patience must be at least 1, got {self.patience}")


@dataclass(frozen=True)
class AnomalyReport:
    """`details` of all that is wrong now; `new` is what started with this update."""

    details: dict[str, str] = field(default_factory=dict)
    new: tuple[str, ...] = ()

    @property
    def has_anomaly(self) -> bool:
        return bool(self.details)

    @property
    def anomaly_types(self) -> tuple[str, ...]:
        """Without the names of heads, each once."""
        return tuple(dict.fromkeys(name.partition(":")[0] for name in self.details))

    def events(self, update: int) -> tuple[AnomalyDetected, ...]:
        """For what started with this update."""
        return tuple(
            AnomalyDetected(
                env=-1,
                step=update,
                anomaly=name.partition(":")[0],
                detail=self.details[name],
                worst_head=name.partition(":")[2] or None,
            )
            for name in self.new
        )


# --- single checks: what is None was not measured and gives no finding ---------------------------


def check_ratios(
    ratio_max: float | None, ratio_min: float | None, limits: AnomalyThresholds
) -> Findings:
    found: Findings = {}
    if ratio_max is not None:
        bad = ratio_max > limits.ratio_max
        found["ratio_explosion"] = f"ratio {ratio_max:.3g} > {limits.ratio_max}" if bad else None
    if ratio_min is not None:
        bad = ratio_min < limits.ratio_min
        found["ratio_collapse"] = f"ratio {ratio_min:.3g} < {limits.ratio_min}" if bad else None
    return found


def value_threshold(current_round: int, total_rounds: int, limits: AnomalyThresholds) -> float:
    """A critic has to explain more the longer the run has lasted."""
    if current_round <= 0 or total_rounds <= 0:
        raise ValueError(f"rounds are counted from 1, got {current_round} of {total_rounds}")
    progress = current_round / total_rounds
    for until, threshold in limits.value_phases:
        if progress < until:
            return threshold
    return limits.value_phases[-1][1]


def check_value(
    explained_variance: float | None,
    current_round: int,
    total_rounds: int,
    limits: AnomalyThresholds,
) -> Findings:
    least = value_threshold(current_round, total_rounds, limits)
    if explained_variance is None:
        return {}
    bad = explained_variance < least
    detail = f"explained variance {explained_variance:.3g} < {least}"
    return {"value_collapse": detail if bad else None}


def check_numbers(numbers: Mapping[str, float | None]) -> Findings:
    """NaN or infinity among `numbers`."""
    bad = [
        name for name, value in numbers.items() if value is not None and not math.isfinite(value)
    ]
    return {"numerical_instability": f"not finite: {', '.join(sorted(bad))}" if bad else None}


def check_entropy(entropies: Mapping[str, float | None], limits: AnomalyThresholds) -> Findings:
    """One finding per head that was drawn at all."""
    found: Findings = {}
    for head, value in entropies.items():
        if value is None:
            continue
        for name in ("entropy_collapse", "entropy_low"):
            limit = getattr(limits, name)
            detail = f"entropy of the {head} head {value:.3g} < {limit}"
            found[f"{name}:{head}"] = detail if value < limit else None
    return found


def check_kl(kl: float | None, limits: AnomalyThresholds) -> Findings:
    if kl is None:
        return {}
    return {
        name: f"KL {kl:.3g} > {limit}" if kl > limit else None
        for name, limit in (("kl_extreme", limits.kl_extreme), ("kl_spike", limits.kl_spike))
    }


def check_drift(
    norm_drift: float | None, health_drift: float | None, limits: AnomalyThresholds
) -> Findings:
    drifts = {"gradient_norm_drift": norm_drift, "gradient_health_drift": health_drift}
    return {
        name: f"{drift:.3g} away from its mean > {limits.drift}" if drift > limits.drift else None
        for name, drift in drifts.items()
        if drift is not None
    }


def check_hidden(unhealthy_envs: int | None) -> Findings:
    """Hidden states at the end of an episode that have vanished or blown up."""
    if unhealthy_envs is None:
        return {}
    detail = f"{unhealthy_envs} hidden states not within {c.LSTM_MIN_NORM} and {c.LSTM_MAX_NORM}"
    return {"lstm_unhealthy": detail if unhealthy_envs else None}


# --- over updates --------------------------------------------------------------------------------


class AnomalyDetector:
    """Call one of the `check_` methods once per update; it remembers what it saw before."""

    def __init__(self, thresholds: AnomalyThresholds | None = None) -> None:
        self.thresholds = thresholds or AnomalyThresholds()
        self.bad_in_a_row: dict[str, int] = {}
        self.good_in_a_row: dict[str, int] = {}
        self.active: dict[str, str] = {}

    def check_all(
        self,
        *,
        current_round: int,
        total_rounds: int,
        ratio_max: float | None = None,
        ratio_min: float | None = None,
        explained_variance: float | None = None,
        entropy: Mapping[str, float | None] | None = None,
        kl: float | None = None,
        numbers: Mapping[str, float | None] | None = None,
        norm_drift: float | None = None,
        health_drift: float | None = None,
        unhealthy_envs: int | None = None,
    ) -> AnomalyReport:
        """`entropy` by head; `numbers` is anything that has to be finite; None is not measured."""
        limits = self.thresholds
        return self._remember(
            check_ratios(ratio_max, ratio_min, limits)
            | check_value(explained_variance, current_round, total_rounds, limits)
            | check_entropy(entropy or {}, limits)
            | check_kl(kl, limits)
            | check_drift(norm_drift, health_drift, limits)
            | check_hidden(unhealthy_envs)
            | ({} if numbers is None else check_numbers(numbers))
        )

    def check_update(
        self,
        row: Mapping[str, Any],
        *,
        current_round: int,
        total_rounds: int,
        norm_drift: float | None = None,
        health_drift: float | None = None,
    ) -> AnomalyReport:
        """The same from the flat row of an agent's update metrics, with those of its LSTM or not.

        An update that had data but was skipped could not trust its numbers.
        """
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        if row.get("skipped") is not None and row.get("steps", 0) > 0:
            numbers[f"update skipped: {row['skipped']}"] = math.nan
        return self.check_all(
            current_round=current_round,
            total_rounds=total_rounds,
            ratio_max=row.get("ratio_max"),
            ratio_min=row.get("ratio_min"),
            explained_variance=row.get("explained_variance"),
            entropy={head: row.get(f"{head}_entropy") for head in HEAD_NAMES},
            kl=row.get("approx_kl_max"),
            numbers=numbers,
            norm_drift=norm_drift,
            health_drift=health_drift,
            unhealthy_envs=row.get("lstm_unhealthy_envs"),
        )

    def _remember(self, findings: Findings) -> AnomalyReport:
        before = set(self.active)
        for name, detail in findings.items():
            bad = detail is not None
            self.bad_in_a_row[name] = self.bad_in_a_row.get(name, 0) + 1 if bad else 0
            self.good_in_a_row[name] = 0 if bad else self.good_in_a_row.get(name, 0) + 1
            needed = 1 if name in AT_ONCE else self.thresholds.patience
            if detail is not None and (name in self.active or self.bad_in_a_row[name] >= needed):
                self.active[name] = detail
            elif name in self.active and self.good_in_a_row[name] >= self.thresholds.patience:
                del self.active[name]
        details = {n: d for n, d in self.active.items() if not self._graver(n, self.active)}
        return AnomalyReport(details, tuple(name for name in details if name not in before))

    @staticmethod
    def _graver(name: str, among: Iterable[str]) -> bool:
        kind, separator, head = name.partition(":")
        return GRAVER.get(kind, "") + separator + head in among

    def state_dict(self) -> dict[str, Any]:
        return {
            "bad_in_a_row": dict(self.bad_in_a_row),
            "good_in_a_row": dict(self.good_in_a_row),
            "active": dict(self.active),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bad_in_a_row = dict(state["bad_in_a_row"])
        self.good_in_a_row = dict(state["good_in_a_row"])
        self.active = dict(state["active"])


class Escalation:
    """Whether to look closely: for some rounds after each one in which something was wrong.

    It decides what is recorded of the policy's learning, never what a seed may do.
    """

    def __init__(self) -> None:
        self.remaining = 0

    @property
    def closely(self) -> bool:
        return self.remaining > 0

    def note(self, anomaly: bool) -> None:
        """Once per round: an anomaly counts for the next rounds, a quiet one uses one up."""
        self.remaining = c.ESCALATION_ROUNDS if anomaly else max(0, self.remaining - 1)

    def state_dict(self) -> dict[str, int]:
        return {"remaining": self.remaining}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.remaining = state["remaining"]
