"""What the environments are made of: E copies of a growth problem, and how they are rendered."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from esper.leyline import (
    BLEND_NAMES,
    BLUEPRINT,
    NUM_OPS,
    OP,
    SLOT,
    ActionMasks,
    LifecycleOp,
    SeedStage,
)
from esper.observatory.formatting import STAGE_COLOURS

STAGE_NAMES = {
    SeedStage.DORMANT: "empty",
    SeedStage.GERMINATED: "planted",
    SeedStage.TRAINING: "learning",
    SeedStage.BLENDING: "blending",
    SeedStage.HOLDING: "on trial",
    SeedStage.FOSSILIZED: "kept",
    SeedStage.CULLED: "removed",
    SeedStage.EMBARGOED: "resting",
    SeedStage.RESETTING: "resting",
}

CELL, LANE, CURVE, GAP = 12, 16, 96, 2  # pixels
BACKGROUND, BAR, EMPTY = np.array([[255] * 3, [34] * 3, [238] * 3], np.uint8)


@dataclass(frozen=True)
class Observed:
    """What E copies show: observations [E, n], masks, and further information, arrays [E]."""

    observations: np.ndarray
    masks: ActionMasks
    info: Mapping[str, np.ndarray]


class Problem(ABC):
    """E copies that step together. Episodes have `length` steps: all start and end at once.

    slots, blueprints  names of them
    actions            the last ones, int64 [E, 4]; all zeros is WAIT
    history            since the start: (height of the bar [E], from 0 to 1, and stages [E, S])
    """

    length: int
    actions: np.ndarray
    history: list[tuple[np.ndarray, np.ndarray]]

    def __init__(
        self,
        n_envs: int,
        slots: Sequence[str],
        blueprints: Sequence[str],
        observation_space: spaces.Space[Any],
    ) -> None:
        self.n_envs, self.slots, self.blueprints = n_envs, slots, blueprints
        self.observation_space = observation_space
        self.sizes = (len(slots), len(blueprints), len(BLEND_NAMES), NUM_OPS)

    @abstractmethod
    def reset(self, keys: Sequence[int]) -> Observed:
        """Start an episode for each copy; what is random in it depends on its key only."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> tuple[Observed, np.ndarray, bool]:
        """What is observed after legal actions (int [E, 4]), rewards [E], and whether it ends."""

    @abstractmethod
    def headline(self, env: int, action: str) -> str:
        """A line about one copy, with its last action."""

    @abstractmethod
    def describe_seed(self, env: int, slot: int) -> str:
        """What the text says about a slot besides its stage."""

    def text(self, env: int) -> str:
        """One copy for a terminal: a headline, and a line for each slot."""
        op = LifecycleOp(int(self.actions[env, OP]))
        action = op.name
        if op == LifecycleOp.GERMINATE:
            action += f" {self.blueprints[self.actions[env, BLUEPRINT]]}"
        if op != LifecycleOp.WAIT:
            action += f" in {self.slots[self.actions[env, SLOT]]}"
        lines = [self.headline(env, action)]
        for slot, stage in enumerate(self.history[-1][1][env]):
            seed = self.describe_seed(env, slot)
            lines.append(f"  {self.slots[slot]}: {STAGE_NAMES[SeedStage(stage)]} {seed}".rstrip())
        return "\n".join(lines) + "\n"

    def picture(self, env: int) -> np.ndarray:
        """One copy as uint8 [height, width, 3]: a bar for each step of the episode, and under it a
        lane for each slot, coloured by stage. The size is the same throughout an episode."""
        image = np.full((CURVE + len(self.slots) * LANE, (self.length + 1) * CELL, 3), BACKGROUND)
        image[CURVE:] = EMPTY
        for time, (heights, stages) in enumerate(self.history):
            columns = slice(time * CELL, (time + 1) * CELL - GAP)
            height = round(float(np.clip(heights[env], 0.0, 1.0)) * (CURVE - GAP))
            image[CURVE - GAP - height : CURVE - GAP, columns] = BAR
            for slot, stage in enumerate(stages[env]):
                top = CURVE + slot * LANE
                image[top : top + LANE - GAP, columns] = _colour(SeedStage(stage))
        return image


def _colour(stage: SeedStage) -> np.ndarray:
    colour = STAGE_COLOURS.get(stage.name)
    return EMPTY if colour is None else np.frombuffer(bytes.fromhex(colour[1:]), np.uint8)
