"""What every controller is: something that turns a situation into one action per environment."""

from typing import Protocol

import numpy as np

from esper.leyline import HEAD_NAMES, OP, LifecycleOp
from esper.tamiyo.situation import Situation


class Controller(Protocol):
    """Rule or learned policy. `reset` comes before the first `act` of every episode."""

    name: str

    def reset(self, n_envs: int) -> None: ...

    def act(self, situation: Situation) -> np.ndarray:
        """int64 [E, 4] in the order of HEAD_NAMES; every row legal, irrelevant heads 0."""
        ...


def wait(n_envs: int) -> np.ndarray:
    """The action WAIT for every environment."""
    actions = np.zeros((n_envs, len(HEAD_NAMES)), dtype=np.int64)
    actions[:, OP] = LifecycleOp.WAIT
    return actions
