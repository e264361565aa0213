"""Alpha schedules: how far a seed is blended in, as a function of progress in [0, 1].

To add a schedule, write a function and list it in SCHEDULES under its name in BLEND_NAMES.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from esper.leyline import BLEND_NAMES

SIGMOID_STEEPNESS = 12.0


def linear(progress: np.ndarray) -> np.ndarray:
    return progress


def sigmoid(progress: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-(progress - 0.5) * SIGMOID_STEEPNESS))


# A gated blend ramps linearly on average; a learned gate shifts it per sample on the way.
SCHEDULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": linear,
    "sigmoid": sigmoid,
    "gated": linear,
}
GATED = BLEND_NAMES.index("gated")


def scheduled_alpha(blend: ArrayLike, step: ArrayLike, total_steps: int) -> np.ndarray:
    """Alpha of each seed after `step` of `total_steps` blending steps; `blend` holds indices."""
    progress = np.clip(np.asarray(step, dtype=np.float64) / total_steps, 0.0, 1.0)
    by_name = np.stack([SCHEDULES[name](progress) for name in BLEND_NAMES])
    return np.take_along_axis(by_name, np.asarray(blend)[None], axis=0)[0]
