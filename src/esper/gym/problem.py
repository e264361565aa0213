"""What the environments are made of: E copies of a problem.

Copies step together and their episodes are equally long, so that all of them begin and end at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from esper.gym.rendering import Look
from esper.leyline import ActionMasks


@dataclass(frozen=True)
class Seen:
    """What E copies show: observations [E, n], masks, and facts, each an array [E]."""

    observations: np.ndarray
    masks: ActionMasks
    facts: Mapping[str, np.ndarray]


class Problem(Protocol):
    """`sizes` are the numbers of slots, blueprints, blends and ops."""

    n_envs: int
    sizes: tuple[int, ...]
    observation_space: spaces.Space[Any]

    def reset(self, keys: Sequence[int]) -> Seen:
        """Begin an episode for each copy; what is random in it is a function of its key."""
        ...

    def step(self, rows: np.ndarray) -> tuple[Seen, np.ndarray, bool]:
        """What is seen after legal decisions (int [E, 4]), rewards [E], and whether it is over."""
        ...

    def look(self, env: int) -> Look: ...
