"""The gates a seed has to pass, as levels and as the result of one examination."""

from dataclasses import dataclass
from enum import IntEnum

from esper.leyline.stages import SeedStage


class GateLevel(IntEnum):
    """Level 4 is reserved and never used."""

    G0 = 0
    G1 = 1
    G2 = 2
    G3 = 3
    G5 = 5


GATE_FOR_TARGET: dict[SeedStage, GateLevel] = {
    SeedStage.GERMINATED: GateLevel.G0,
    SeedStage.TRAINING: GateLevel.G1,
    SeedStage.BLENDING: GateLevel.G2,
    SeedStage.HOLDING: GateLevel.G3,
    SeedStage.FOSSILIZED: GateLevel.G5,
}


@dataclass(frozen=True)
class GateResult:
    """What a gate found for one seed; `checks_failed` says why it did not pass."""

    gate: GateLevel
    passed: bool
    score: float
    checks_passed: tuple[str, ...]
    checks_failed: tuple[str, ...]
