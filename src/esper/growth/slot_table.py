"""The state of all slots of all hosts, as one table of arrays [environment, slot].

To add a measurement of seeds, add a column here and measure it where seeds are measured
(`tolaria/engine/gradients.py` for training); with `told=True` it is in every row of metrics too.
"""

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np

from esper.leyline import HOLDS_SEED, SeedStage


def _of_slot(empty: float, dtype: type = np.int64) -> dict[str, Any]:
    """A column that outlives the seed."""
    return {"empty": empty, "dtype": dtype, "of_seed": False, "told": False}


def _of_seed(empty: float, dtype: type = np.float64, *, told: bool = False) -> dict[str, Any]:
    """A column about the seed: `empty` without one."""
    return {"empty": empty, "dtype": dtype, "of_seed": True, "told": told}


@dataclass(frozen=True)
class SlotTable:
    """E x S arrays. NaN is 'not measured'; an empty slot has blueprint and blend -1.

    alpha           what is applied, on average over the last validation pass
    alpha_step      blending steps done, of BLENDING_TOTAL_STEPS
    epochs_total    age since germination; counts cooldown once the seed is culled
    noise           of the whole network's validation score from epoch to epoch, in its own units
    score_at_birth, score_at_stage_start, score   validation score of the whole network
    contribution    score minus the score with this seed taken out
    gradient_ratio  gradient of the seed against the host's, per parameter
    gradient_norm, gradient_health   of the seed in the last epoch
    params, macs    cost of the seed (multiply-adds per example), the valve of its blend included
    """

    stage: np.ndarray = field(metadata=_of_slot(SeedStage.DORMANT))
    previous_stage: np.ndarray = field(metadata=_of_slot(SeedStage.DORMANT))
    epochs_in_stage: np.ndarray = field(metadata=_of_slot(0))
    epochs_total: np.ndarray = field(metadata=_of_slot(0))
    noise: np.ndarray = field(metadata=_of_slot(np.nan, np.float64))
    blueprint: np.ndarray = field(metadata=_of_seed(-1, np.int64))
    blend: np.ndarray = field(metadata=_of_seed(-1, np.int64))
    alpha: np.ndarray = field(metadata=_of_seed(0.0, told=True))
    alpha_step: np.ndarray = field(metadata=_of_seed(0, np.int64))
    score_at_birth: np.ndarray = field(metadata=_of_seed(np.nan))
    score_at_stage_start: np.ndarray = field(metadata=_of_seed(np.nan))
    score: np.ndarray = field(metadata=_of_seed(np.nan))
    contribution: np.ndarray = field(metadata=_of_seed(np.nan, told=True))
    gradient_ratio: np.ndarray = field(metadata=_of_seed(np.nan, told=True))
    gradient_norm: np.ndarray = field(metadata=_of_seed(np.nan))
    gradient_health: np.ndarray = field(metadata=_of_seed(np.nan))
    healthy: np.ndarray = field(metadata=_of_seed(True, np.bool_))
    params: np.ndarray = field(metadata=_of_seed(0, np.int64))
    macs: np.ndarray = field(metadata=_of_seed(0, np.int64))

    @staticmethod
    def empty(n_envs: int, n_slots: int) -> "SlotTable":
        return SlotTable(
            *(
                np.full((n_envs, n_slots), column.metadata["empty"], column.metadata["dtype"])
                for column in fields(SlotTable)
            )
        )

    @staticmethod
    @cache
    def told() -> tuple[str, ...]:
        """The measurements that belong into the record of every step."""
        return tuple(column.name for column in fields(SlotTable) if column.metadata["told"])

    @property
    def shape(self) -> tuple[int, int]:
        return self.stage.shape[0], self.stage.shape[1]

    @property
    def holds_seed(self) -> np.ndarray:
        return HOLDS_SEED[self.stage]

    @property
    def improvement_since_stage_start(self) -> np.ndarray:
        return self.score - self.score_at_stage_start

    @property
    def total_improvement(self) -> np.ndarray:
        return self.score - self.score_at_birth

    def clear(self, where: np.ndarray) -> None:
        """Make slots DORMANT and forget the seeds they held."""
        for column in fields(self):
            getattr(self, column.name)[where] = column.metadata["empty"]

    def forget(self, where: np.ndarray) -> None:
        """Drop everything about the seeds of some slots but the slots' stage and age."""
        for column in fields(self):
            if column.metadata["of_seed"]:
                getattr(self, column.name)[where] = column.metadata["empty"]

    def copy(self) -> "SlotTable":
        return SlotTable(*(column.copy() for column in vars(self).values()))

    def row(self, env: int) -> "SlotTable":
        """A copy of one environment's slots, [1, S]."""
        return SlotTable(*(column[env : env + 1].copy() for column in vars(self).values()))

    def set_row(self, env: int, row: "SlotTable") -> None:
        for column in fields(self):
            getattr(self, column.name)[env] = getattr(row, column.name)[0]
