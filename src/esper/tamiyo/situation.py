"""What a controller may look at before it decides."""

from dataclasses import dataclass

import numpy as np

from esper.growth import BlueprintCatalogue, SlotTable
from esper.leyline import ActionMasks, SlotConfig, TrainingSignals


@dataclass(frozen=True)
class Situation:
    """E environments after step `step` of `max_steps`; a controller must not change any of it.

    keys         int[E], the key of each environment's episode
    running       bool[E], False once an environment's episode is over
    total_params  int[E], host and seeds together
    max_seeds     how many seeds an environment may hold, None for no limit
    """

    step: int
    max_steps: int
    keys: np.ndarray
    running: np.ndarray
    signals: TrainingSignals
    table: SlotTable
    masks: ActionMasks
    slot_config: SlotConfig
    catalogue: BlueprintCatalogue
    host_params: int
    total_params: np.ndarray
    max_seeds: int | None = None

    @property
    def n_envs(self) -> int:
        return len(self.keys)
