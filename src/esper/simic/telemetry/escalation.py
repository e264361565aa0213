"""How much is measured: a level, raised for some rounds after an anomaly."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from esper.leyline import ConfigError
from esper.leyline.constants import ESCALATION_ROUNDS


class TelemetryLevel(IntEnum):
    OFF = 0
    MINIMAL = 1
    NORMAL = 2
    DEBUG = 3


@dataclass(frozen=True)
class TelemetryConfig:
    """What a seed may do never depends on the level: gates have readings of their own."""

    level: TelemetryLevel = TelemetryLevel.NORMAL
    auto_escalate: bool = True
    escalation_rounds: int = ESCALATION_ROUNDS

    def __post_init__(self) -> None:
        if self.escalation_rounds < 1:
            raise ConfigError(f"escalation_rounds must be at least 1, got {self.escalation_rounds}")


class Escalation:
    """The level in force. Call `note` once per round, with whether an anomaly was found."""

    def __init__(self, config: TelemetryConfig | None = None) -> None:
        self.config = config or TelemetryConfig()
        self.remaining = 0

    @property
    def level(self) -> TelemetryLevel:
        return TelemetryLevel.DEBUG if self.remaining > 0 else self.config.level

    def wants(self, level: TelemetryLevel) -> bool:
        return self.level >= level

    def note(self, anomaly: bool) -> None:
        """An anomaly raises the level for the next rounds; a quiet round uses one of them up.

        Who asked for no telemetry at all gets none.
        """
        if anomaly and self.config.auto_escalate and self.config.level > TelemetryLevel.OFF:
            self.remaining = self.config.escalation_rounds
        elif self.remaining > 0:
            self.remaining -= 1

    def state_dict(self) -> dict[str, int]:
        return {"remaining": self.remaining}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.remaining = state["remaining"]
