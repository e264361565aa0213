"""The gates between stages: named checks over the whole SlotTable at once.

A value that was not measured is NaN, and every comparison with NaN fails the check.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from esper.growth.slot_table import SlotTable
from esper.leyline import ConfigError, GateLevel, GateResult, SeedStage
from esper.leyline import constants as c


@dataclass(frozen=True)
class LifecycleRules:
    """Timing and thresholds of the lifecycle; epochs are environment steps, scores are in pp.

    max_steps    length of the episode, which scales two of the timings
    incubation   'isolated': a seed learns without acting before it is blended in;
                 'joint': its alpha ramps from birth
    """

    max_steps: int
    incubation: Literal["isolated", "joint"] = "isolated"
    blending_steps: int = c.BLENDING_TOTAL_STEPS
    min_gradient_ratio: float = c.GRADIENT_RATIO_THRESHOLD
    min_fossilize_contribution: float = c.MIN_FOSSILIZE_CONTRIBUTION

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ConfigError(f"a run needs at least 1 step, got {self.max_steps}")
        if self.blending_steps < 1:
            raise ConfigError(f"blending needs at least 1 step, got {self.blending_steps}")
        if self.incubation not in ("isolated", "joint"):
            raise ConfigError(f"incubation must be 'isolated' or 'joint', got {self.incubation!r}")

    @property
    def training_epochs(self) -> int:
        return max(c.MIN_TRAINING_EPOCHS, int(self.max_steps * c.TRAIN_TO_BLEND_FRACTION))

    @property
    def holding_epochs(self) -> int:
        return max(c.MAX_HOLDING_EPOCHS, int(self.max_steps * c.HOLDING_EPOCHS_FRACTION))


def gate_checks(gate: GateLevel, table: SlotTable, rules: LifecycleRules) -> dict[str, np.ndarray]:
    """What the gate looks at, by name; each bool[E, S]. It passes where all of them hold."""
    if gate == GateLevel.G0:
        return {"blueprint_present": table.blueprint >= 0}
    if gate == GateLevel.G1:
        return {"germinated": table.stage == SeedStage.GERMINATED}
    if gate == GateLevel.G2:
        if rules.incubation == "joint":
            return {"training": table.stage == SeedStage.TRAINING}
        return {
            "seed_ready": table.epochs_in_stage >= rules.training_epochs,
            "seed_gradient_active": table.gradient_ratio >= rules.min_gradient_ratio,
        }
    if gate == GateLevel.G3:
        least = min(c.MIN_BLENDING_EPOCHS, rules.blending_steps)
        return {
            "blending_complete": table.epochs_in_stage >= least,
            "alpha_high": table.alpha >= c.ALPHA_COMPLETE_THRESHOLD,
        }
    return {
        "counterfactual_available": ~np.isnan(table.contribution),
        "sufficient_contribution": table.contribution >= rules.min_fossilize_contribution,
        "healthy": table.healthy,
    }


def gate_passes(gate: GateLevel, table: SlotTable, rules: LifecycleRules) -> np.ndarray:
    """bool[E, S]"""
    return np.logical_and.reduce(list(gate_checks(gate, table, rules).values()))


def gate_result(
    gate: GateLevel, table: SlotTable, rules: LifecycleRules, env: int, slot: int
) -> GateResult:
    """The gate's findings about one seed. The score in [0, 1] is how well it did."""
    checks = {name: bool(ok[env, slot]) for name, ok in gate_checks(gate, table, rules).items()}
    passed = all(checks.values())
    measured = {
        GateLevel.G2: table.gradient_ratio[env, slot],
        GateLevel.G3: table.alpha[env, slot],
        GateLevel.G5: table.contribution[env, slot] / 10.0,
    }.get(gate, float(passed))
    return GateResult(
        gate,
        passed,
        score=float(np.clip(np.nan_to_num(measured, nan=0.0), 0.0, 1.0)),
        checks_passed=tuple(name for name, ok in checks.items() if ok),
        checks_failed=tuple(name for name, ok in checks.items() if not ok),
    )
