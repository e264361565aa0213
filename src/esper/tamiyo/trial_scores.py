"""What candidates would bring, by trial: what a controller asks for, and what it is told."""

from dataclasses import dataclass

import numpy as np

from esper.growth import BlueprintCatalogue
from esper.leyline import ActionMasks, ConfigError, LifecycleOp
from esper.leyline.constants import SHORT_TRIAL, TRIAL_BATCH, TRIAL_STEPS, TRIAL_VAL_SAMPLES


@dataclass(frozen=True)
class TrialPlan:
    """Every candidate is trained alone, in a frozen host, for `steps` steps of at most `batch`
    examples, and compared with the host on the first `val_samples` examples of validation.

    Of `blueprints` those that there are and that fit are tried, in every empty slot.
    """

    blueprints: tuple[str, ...]
    steps: int = TRIAL_STEPS
    batch: int = TRIAL_BATCH
    val_samples: int = TRIAL_VAL_SAMPLES

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "val_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a trial must be 1 or more, got {getattr(self, name)}")
        if not self.blueprints:
            raise ConfigError("a trial needs at least one blueprint to try")

    def shortened(self) -> "TrialPlan":
        """What a small budget pays for."""
        now = (self.steps, self.batch, self.val_samples)
        steps, batch, val_samples = map(min, now, SHORT_TRIAL)
        return TrialPlan(self.blueprints, steps, batch, val_samples)

    def candidates(self, masks: ActionMasks, catalogue: BlueprintCatalogue) -> np.ndarray:
        """bool[E, S, B]: what could be planted now and is on the list."""
        listed = np.isin(catalogue.names, self.blueprints)
        return masks.blueprint & masks.slot[:, LifecycleOp.GERMINATE, :, None] & listed


@dataclass(frozen=True)
class TrialScores:
    """Results of the trials of one step; those of hosts that were not asked about are NaN.

    gain    [E, S, B], by how much the validation loss falls with the candidate; NaN where it was
            not tried, -inf where it broke the network
    error   [E, S, B], its standard error, NaN where that is not known
    params, macs  [S, B], what the candidate costs, multiply-adds per example
    step    when they were run
    """

    gain: np.ndarray
    error: np.ndarray
    params: np.ndarray
    macs: np.ndarray
    step: int
