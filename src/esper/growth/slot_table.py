"""The state of all slots of all hosts, as one table of arrays [environment, slot].

To add a measurement of seeds, add one entry to COLUMNS with a function `measure`. It is then
computed for looped and fused populations, and controllers find it in the table. With `in_metrics`
it is written to every row of metrics.jsonl, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from esper.leyline import HOLDS_SEED, IS_ACTIVE, SeedStage
from esper.leyline.constants import GRADIENT_RATIO_CAP

Values = np.ndarray | float


@dataclass(frozen=True)
class GradientReading:
    """Gradients of one or more seeds on one or more batches.

    norm, unclipped_norm, host_norm   gradient norms of the seed, and before clipping
    params, host_params               numbers of trainable parameters
    live_tensors, tensors             parameter tensors with a finite non-zero gradient, and all
    """

    norm: Values
    unclipped_norm: Values
    host_norm: Values
    params: Values
    host_params: int
    live_tensors: Values
    tensors: Values


def gradient_ratio(reading: GradientReading) -> np.ndarray:
    """(|g_seed| / |g_host|) * sqrt(n_host / n_seed), at most GRADIENT_RATIO_CAP; 0 where the host
    has almost no gradient or the seed has no parameters."""
    comparable = (reading.host_norm >= 1e-8) & (reading.params > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.divide(reading.unclipped_norm, reading.host_norm)
        ratio = ratio * np.sqrt(np.divide(reading.host_params, reading.params))
    return np.where(comparable, np.minimum(ratio, GRADIENT_RATIO_CAP), 0.0)


def gradient_health(reading: GradientReading) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.divide(reading.live_tensors, reading.tensors)


@dataclass(frozen=True)
class Column:
    """`empty` is the value without a seed, `of_seed` is False for columns that outlive the seed.

    `measure` gives the column's value from gradients; readings of an epoch are averaged.
    """

    empty: float = np.nan
    dtype: type = np.float64
    of_seed: bool = True
    in_metrics: bool = False
    measure: Callable[[GradientReading], Values] | None = None


COLUMNS: dict[str, Column] = {
    "stage": Column(SeedStage.DORMANT, np.int64, of_seed=False),
    "previous_stage": Column(SeedStage.DORMANT, np.int64, of_seed=False),
    "epochs_in_stage": Column(0, np.int64, of_seed=False),
    # Age since germination; once the seed is culled, epochs of the cooldown.
    "epochs_total": Column(0, np.int64, of_seed=False),
    # How much the network's validation score varies from epoch to epoch, in its own units.
    "noise": Column(of_seed=False),
    "blueprint": Column(-1, np.int64),
    "blend": Column(-1, np.int64),
    # The applied alpha, on average over the last validation pass.
    "alpha": Column(0.0, in_metrics=True),
    "alpha_step": Column(0, np.int64),
    # Validation scores of the whole network.
    "score_at_birth": Column(),
    "score_at_stage_start": Column(),
    "score": Column(),
    # Score minus the score with this seed taken out, when that was last measured.
    "contribution": Column(in_metrics=True),
    # Gradient of the seed relative to the host's, per parameter.
    "gradient_ratio": Column(in_metrics=True, measure=gradient_ratio),
    "gradient_norm": Column(measure=lambda reading: reading.norm),
    # Share of the seed's parameter tensors with a finite non-zero gradient.
    "gradient_health": Column(measure=gradient_health),
    "healthy": Column(True, np.bool_),
    # Cost of the seed, including the valve of its blend; multiply-adds per example.
    "params": Column(0, np.int64),
    "macs": Column(0, np.int64),
}


def measurements() -> dict[str, Callable[[GradientReading], Values]]:
    return {name: column.measure for name, column in COLUMNS.items() if column.measure}


def metrics_columns() -> list[str]:
    """The columns that every row of metrics.jsonl has for each slot."""
    return [name for name, column in COLUMNS.items() if column.in_metrics]


class SlotTable:
    """One [E, S] array for each of COLUMNS, as attributes. NaN means 'not measured'."""

    def __init__(self, **columns: np.ndarray) -> None:
        vars(self).update(columns)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> np.ndarray: ...

    @staticmethod
    def empty(n_envs: int, n_slots: int) -> "SlotTable":
        shape = (n_envs, n_slots)
        return SlotTable(
            **{name: np.full(shape, column.empty, column.dtype) for name, column in COLUMNS.items()}
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.stage.shape[0], self.stage.shape[1]

    @property
    def holds_seed(self) -> np.ndarray:
        return HOLDS_SEED[self.stage]

    @property
    def active_macs(self) -> np.ndarray:
        """int[E, S]: multiply-adds of the seeds in the forward pass."""
        return np.where(IS_ACTIVE[self.stage], self.macs, 0)

    @property
    def improvement_since_stage_start(self) -> np.ndarray:
        return self.score - self.score_at_stage_start

    @property
    def total_improvement(self) -> np.ndarray:
        return self.score - self.score_at_birth

    def clear(self, where: np.ndarray, *, keep_slot: bool = False) -> None:
        """Make slots DORMANT and empty; `keep_slot` keeps the slot's own stage and age."""
        for name, values in vars(self).items():
            if COLUMNS[name].of_seed or not keep_slot:
                values[where] = COLUMNS[name].empty

    def copy(self) -> "SlotTable":
        return SlotTable(**{name: values.copy() for name, values in vars(self).items()})

    def row(self, env: int) -> "SlotTable":
        """A copy of one environment's slots, [1, S]."""
        return SlotTable(**{name: v[env : env + 1].copy() for name, v in vars(self).items()})

    def set_row(self, env: int, row: "SlotTable") -> None:
        for name, values in vars(self).items():
            values[env] = getattr(row, name)[0]
