"""The state of all slots of all hosts, as one table of arrays [environment, slot]."""

from dataclasses import dataclass, fields

import numpy as np

from esper.leyline import HOLDS_SEED, IS_LIVE, SeedStage
from esper.leyline.constants import NEWBORN_EPOCHS


@dataclass(frozen=True)
class SlotTable:
    """E x S arrays. NaN is 'not measured'; an empty slot has blueprint and blend -1.

    alpha           what is applied, on average over the last validation pass
    alpha_step      blending steps done, of BLENDING_TOTAL_STEPS
    epochs_total    age since germination; counts cooldown once the seed is culled
    score_at_birth, score_at_stage_start, score   validation score of the whole network, in pp
    contribution    score minus the score with this seed taken out, in pp
    gradient_ratio  gradient of the seed against the host's, per parameter
    gradient_norm, gradient_health   of the seed in the last epoch
    activation_ratio   size of the seed's output against what it is added to
    params, macs    cost of the seed (multiply-adds per example), the valve of its blend included
    """

    stage: np.ndarray
    previous_stage: np.ndarray
    blueprint: np.ndarray
    blend: np.ndarray
    alpha: np.ndarray
    alpha_step: np.ndarray
    epochs_in_stage: np.ndarray
    epochs_total: np.ndarray
    score_at_birth: np.ndarray
    score_at_stage_start: np.ndarray
    score: np.ndarray
    contribution: np.ndarray
    gradient_ratio: np.ndarray
    gradient_norm: np.ndarray
    gradient_health: np.ndarray
    activation_ratio: np.ndarray
    healthy: np.ndarray
    params: np.ndarray
    macs: np.ndarray

    @staticmethod
    def empty(n_envs: int, n_slots: int) -> "SlotTable":
        shape = (n_envs, n_slots)
        table = SlotTable(
            stage=np.empty(shape, dtype=np.int64),
            previous_stage=np.empty(shape, dtype=np.int64),
            blueprint=np.empty(shape, dtype=np.int64),
            blend=np.empty(shape, dtype=np.int64),
            alpha=np.empty(shape),
            alpha_step=np.empty(shape, dtype=np.int64),
            epochs_in_stage=np.empty(shape, dtype=np.int64),
            epochs_total=np.empty(shape, dtype=np.int64),
            score_at_birth=np.empty(shape),
            score_at_stage_start=np.empty(shape),
            score=np.empty(shape),
            contribution=np.empty(shape),
            gradient_ratio=np.empty(shape),
            gradient_norm=np.empty(shape),
            gradient_health=np.empty(shape),
            activation_ratio=np.empty(shape),
            healthy=np.empty(shape, dtype=bool),
            params=np.empty(shape, dtype=np.int64),
            macs=np.empty(shape, dtype=np.int64),
        )
        table.clear(np.ones(shape, dtype=bool))
        return table

    @property
    def shape(self) -> tuple[int, int]:
        return self.stage.shape[0], self.stage.shape[1]

    @property
    def holds_seed(self) -> np.ndarray:
        return HOLDS_SEED[self.stage]

    @property
    def newborn(self) -> np.ndarray:
        """bool[E, S]: live seeds in their first epochs."""
        return IS_LIVE[self.stage] & (self.epochs_total <= NEWBORN_EPOCHS)

    @property
    def improvement_since_stage_start(self) -> np.ndarray:
        return self.score - self.score_at_stage_start

    @property
    def total_improvement(self) -> np.ndarray:
        return self.score - self.score_at_birth

    def clear(self, where: np.ndarray) -> None:
        """Make slots DORMANT and forget the seeds they held."""
        self.stage[where] = self.previous_stage[where] = SeedStage.DORMANT
        self.forget(where)
        self.epochs_in_stage[where] = self.epochs_total[where] = 0

    def forget(self, where: np.ndarray) -> None:
        """Drop everything about the seeds of some slots but the slots' stage and age."""
        self.blueprint[where] = self.blend[where] = -1
        for array in (self.alpha, self.alpha_step, self.params, self.macs):
            array[where] = 0
        for array in (
            self.score_at_birth,
            self.score_at_stage_start,
            self.score,
            self.contribution,
            self.gradient_ratio,
            self.gradient_norm,
            self.gradient_health,
            self.activation_ratio,
        ):
            array[where] = np.nan
        self.healthy[where] = True

    def copy(self) -> "SlotTable":
        return SlotTable(*(getattr(self, field.name).copy() for field in fields(self)))

    def row(self, env: int) -> "SlotTable":
        """A copy of one environment's slots, [1, S]."""
        return SlotTable(*(getattr(self, f.name)[env : env + 1].copy() for f in fields(self)))

    def set_row(self, env: int, row: "SlotTable") -> None:
        for field in fields(self):
            getattr(self, field.name)[env] = getattr(row, field.name)[0]
