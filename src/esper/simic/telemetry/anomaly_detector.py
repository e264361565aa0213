"""Detects failures of learning from the metrics of each update.

One noisy update is not enough: an anomaly becomes active after `patience` updates in a row and
inactive after as many without it. A NaN or an extreme KL is never noise and counts at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from esper.leyline import HEAD_NAMES, ConfigError
from esper.leyline import constants as c
from esper.leyline.events import AnomalyDetected

AT_ONCE = ("numerical_instability", "kl_extreme")
# The milder anomaly is not reported together with the graver one.
GRAVER = {"entropy_low": "entropy_collapse", "kl_spike": "kl_extreme"}

# anomaly or anomaly:head, column of the row, direction, name of the threshold, text of the detail
LIMITS = (
    ("ratio_explosion", "ratio_max", ">", "ratio_max", "ratio {:.3g}"),
    ("ratio_collapse", "ratio_min", "<", "ratio_min", "ratio {:.3g}"),
    (
        "value_collapse",
        "explained_variance",
        "<",
        "explained_variance",
        "explained variance {:.3g}",
    ),
    *(
        (f"{kind}:{head}", f"{head}_entropy", "<", kind, f"entropy of the {head} head {{:.3g}}")
        for head in HEAD_NAMES
        for kind in ("entropy_collapse", "entropy_low")
    ),
    ("kl_extreme", "approx_kl_max", ">", "kl_extreme", "KL {:.3g}"),
    ("kl_spike", "approx_kl_max", ">", "kl_spike", "KL {:.3g}"),
    ("gradient_norm_drift", "norm_drift", ">", "drift", "{:.3g} away from its mean"),
    ("gradient_health_drift", "health_drift", ">", "drift", "{:.3g} away from its mean"),
)


@dataclass(frozen=True)
class AnomalyThresholds:
    """Entropies are normalised to [0, 1]; drifts are relative to the running mean. `value_phases`
    are pairs: a share of the run, and the least explained variance until then. The limits of
    probability ratios are those of PPO."""

    entropy_collapse: float = c.ENTROPY_COLLAPSE_THRESHOLD
    entropy_low: float = 0.3
    kl_spike: float = 0.1
    kl_extreme: float = 0.5
    drift: float = 0.5
    value_phases: tuple[tuple[float, float], ...] = (
        (0.10, -0.5),
        (0.25, -0.2),
        (0.75, 0.0),
        (1.0, 0.1),
    )
    patience: int = 2

    def __post_init__(self) -> None:
        for low, high in (("entropy_collapse", "entropy_low"), ("kl_spike", "kl_extreme")):
            if not getattr(self, low) <= getattr(self, high):
                raise ConfigError(f"{low} must not be above {high}")
        if self.patience < 1:
            raise ConfigError(f"patience must be at least 1, got {self.patience}")
        phases = tuple(tuple(phase) for phase in self.value_phases)
        if not phases or any(len(phase) != 2 for phase in phases):
            raise ConfigError(
                "value_phases must be pairs of a share of the run and the least explained variance "
                f"until then, got {self.value_phases!r}"
            )
        # TOML has lists.
        object.__setattr__(self, "value_phases", phases)


@dataclass(frozen=True)
class AnomalyReport:
    """`details` of all active anomalies; `new` are those that began with this update."""

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
        """One event per anomaly that began with this update."""
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


def value_threshold(current_round: int, total_rounds: int, limits: AnomalyThresholds) -> float:
    """The least explained variance: a critic has to explain more as the run goes on."""
    if current_round <= 0 or total_rounds <= 0:
        raise ValueError(f"rounds are counted from 1, got {current_round} of {total_rounds}")
    progress = current_round / total_rounds
    for until, threshold in limits.value_phases:
        if progress < until:
            return threshold
    return limits.value_phases[-1][1]


COUNTS = ("bad_in_a_row", "good_in_a_row", "active")


class AnomalyDetector:
    """Call `check_all` once per update; anomalies are counted over updates.

    `thresholds` and `ratios`, the least and the largest probability ratio, may be set at any time:
    they are not part of its state.
    """

    def __init__(
        self,
        thresholds: AnomalyThresholds | None = None,
        ratios: tuple[float, float] = (c.RATIO_COLLAPSE_THRESHOLD, c.RATIO_EXPLOSION_THRESHOLD),
    ) -> None:
        self.thresholds, self.ratios = thresholds or AnomalyThresholds(), ratios
        self.bad_in_a_row: dict[str, int] = {}
        self.good_in_a_row: dict[str, int] = {}
        self.active: dict[str, str] = {}

    def check_all(
        self,
        row: Mapping[str, Any],
        *,
        current_round: int,
        total_rounds: int,
    ) -> AnomalyReport:
        """Check the flat row of an update's metrics, with the columns of LSTM health and of drift.

        A column that is absent or None was not measured. An update that had data but was skipped
        counts as numerically unstable.
        """
        least = value_threshold(current_round, total_rounds, self.thresholds)
        limits = vars(self.thresholds) | {"explained_variance": least}
        limits |= dict(zip(("ratio_min", "ratio_max"), self.ratios, strict=True))
        found: dict[str, str | None] = {}
        for name, column, sign, limit, text in LIMITS:
            value, bound = row.get(column), limits[limit]
            if value is not None:
                bad = value > bound if sign == ">" else value < bound
                found[name] = f"{text.format(value)} {sign} {bound}" if bad else None
        unhealthy = row.get("lstm_unhealthy_envs")
        if unhealthy is not None:
            detail = f"{unhealthy} hidden states not within {c.LSTM_MIN_NORM} and {c.LSTM_MAX_NORM}"
            found["lstm_unhealthy"] = detail if unhealthy else None
        broken = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        if row.get("skipped") is not None and row.get("steps", 0) > 0:
            broken.append(f"update skipped: {row['skipped']}")
        detail = f"not finite: {', '.join(sorted(broken))}"
        found["numerical_instability"] = detail if broken else None
        return self._count(found)

    def _count(self, found: Mapping[str, str | None]) -> AnomalyReport:
        """`found` has the detail of each anomaly, None if it was measured and is fine."""
        before = set(self.active)
        for name, detail in found.items():
            bad = detail is not None
            self.bad_in_a_row[name] = self.bad_in_a_row.get(name, 0) + 1 if bad else 0
            self.good_in_a_row[name] = 0 if bad else self.good_in_a_row.get(name, 0) + 1
            needed = 1 if name in AT_ONCE else self.thresholds.patience
            if detail is not None and (name in self.active or self.bad_in_a_row[name] >= needed):
                self.active[name] = detail
            elif name in self.active and self.good_in_a_row[name] >= self.thresholds.patience:
                del self.active[name]
        details = {n: d for n, d in self.active.items() if self._graver(n) not in self.active}
        return AnomalyReport(details, tuple(name for name in details if name not in before))

    @staticmethod
    def _graver(name: str) -> str:
        kind, separator, head = name.partition(":")
        return GRAVER.get(kind, "") + separator + head

    def state_dict(self) -> dict[str, Any]:
        return {name: dict(getattr(self, name)) for name in COUNTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in COUNTS:
            setattr(self, name, dict(state[name]))


class Escalation:
    """Requests detailed telemetry for some rounds after each round with an anomaly.

    It decides what is recorded about learning, never what a seed may do.
    """

    def __init__(self) -> None:
        self.remaining = 0

    @property
    def detailed(self) -> bool:
        return self.remaining > 0

    def note(self, anomaly: bool) -> None:
        """Call once per round: an anomaly restarts the count of detailed rounds."""
        self.remaining = c.ESCALATION_ROUNDS if anomaly else max(0, self.remaining - 1)

    def state_dict(self) -> dict[str, int]:
        return {"remaining": self.remaining}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.remaining = state["remaining"]
