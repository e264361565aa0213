"""What a controller sees before it decides, and the interface of a controller."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from esper.growth.blueprints.catalogue import BlueprintCatalogue
from esper.growth.slot_table import SlotTable
from esper.leyline import HEAD_NAMES, OP, ActionMasks, LifecycleOp, SlotConfig, TrainingSignals
from esper.leyline.events import Decided
from esper.tamiyo.slot_facts import SlotFacts


@dataclass(frozen=True)
class Situation:
    """E environments after step `step` of `max_steps`; a controller must not change any of it.

    keys          int[E], the key of each environment's episode
    running       bool[E], False once an environment's episode is over
    total_params  int[E], host and seeds together
    left          float[E], the remaining share of the steps or of the budget of multiply-adds,
                  whichever is less
    max_seeds     most seeds of an environment, None for no limit
    trained       the hosts are already trained; step 0 comes before the first epoch
    facts         static properties of slots and candidates; None if made by hand
    extra         float[E], the budget of multiply-adds relative to the cost of the host's training,
                  NaN or None if there is none
    rho           float[E], how much is left to learn (`engine/starvation.py`), NaN or None if
                  unknown
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
    left: np.ndarray
    max_seeds: int | None = None
    trained: bool = False
    facts: SlotFacts | None = None
    extra: np.ndarray | None = None
    rho: np.ndarray | None = None

    @property
    def n_envs(self) -> int:
        return len(self.keys)


class Controller(Protocol):
    """Rule or learned policy. `reset` is called before the first `act` of every episode.

    A controller with a state of its own also has `state_dict()` and `load_state_dict(state)`, with
    tensors and plain values, so that an episode can be resumed.
    """

    name: str

    def reset(self, n_envs: int) -> None: ...

    def act(self, situation: Situation) -> np.ndarray:
        """int64 [E, 4] in the order of HEAD_NAMES; every row legal, irrelevant heads 0."""


@runtime_checkable
class GivesReasons(Protocol):
    """A controller that can explain its decisions."""

    def reasons(self, actions: np.ndarray) -> list[Decided]:
        """An event for each running environment, about the situation of the last `act`."""


def wait(n_envs: int) -> np.ndarray:
    """The action WAIT for every environment."""
    actions = np.zeros((n_envs, len(HEAD_NAMES)), dtype=np.int64)
    actions[:, OP] = LifecycleOp.WAIT
    return actions
