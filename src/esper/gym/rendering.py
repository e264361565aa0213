"""What an environment looks like: text for a terminal, or a small picture.

The picture has a bar for each step of the episode and under it a lane for each slot, coloured by
stage as in every other view. It is drawn without a plotting library, quickly enough for a video.
"""

from dataclasses import dataclass

import numpy as np

from esper.leyline import SeedStage
from esper.observatory.formatting import STAGE_COLOURS

CELL, LANE, CURVE, GAP = 12, 16, 96, 2  # pixels
PAPER, INK = np.array([255, 255, 255], np.uint8), np.array([34, 34, 34], np.uint8)
EMPTY = np.array([238, 238, 238], np.uint8)


@dataclass(frozen=True)
class Look:
    """One environment, now and since its episode began.

    headline  what there is to say of all of it; `slots` has a line for each slot
    heights   [t], a number from 0 to 1 for the beginning and each step since
    stages    [t, S], the stages of the slots at the same times
    length    of `heights` and `stages` at the end of the episode
    """

    headline: str
    slots: tuple[str, ...]
    heights: np.ndarray
    stages: np.ndarray
    length: int


def text(look: Look) -> str:
    return "\n".join([look.headline, *(f"  {line}" for line in look.slots)]) + "\n"


def picture(look: Look) -> np.ndarray:
    """uint8 [height, width, 3]; its size is the same throughout an episode."""
    n_slots = look.stages.shape[1]
    image = np.full((CURVE + n_slots * LANE, look.length * CELL, 3), PAPER)
    image[CURVE:] = EMPTY
    for time, (height, stages) in enumerate(zip(look.heights, look.stages, strict=True)):
        columns = slice(time * CELL, (time + 1) * CELL - GAP)
        tall = round(float(np.clip(height, 0.0, 1.0)) * (CURVE - GAP))
        image[CURVE - GAP - tall : CURVE - GAP, columns] = INK
        for slot, stage in enumerate(stages):
            top = CURVE + slot * LANE
            image[top : top + LANE - GAP, columns] = _colour(SeedStage(stage))
    return image


def _colour(stage: SeedStage) -> np.ndarray:
    named = STAGE_COLOURS.get(stage.name)
    return EMPTY if named is None else np.frombuffer(bytes.fromhex(named[1:]), np.uint8)
