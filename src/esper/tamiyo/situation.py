"""What a controller may look at before it decides, and what a controller is."""

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

    keys         int[E], the key of each environment's episode
    running       bool[E], False once an environment's episode is over
    total_params  int[E], host and seeds together
    left          float[E], the share of the run that is left, by its steps or by its budget of
                  multiply-adds, whichever is less
    max_seeds     how many seeds an environment may hold, None for no limit
    trained       the hosts arrived trained; then step 0 comes before the first epoch
    facts         what is known of slots and candidates; None in a situation that is made by hand
    extra         float[E], the budget of multiply-adds as a share of what the training of the host
                  cost, NaN where there is none; None: nowhere
    rho           float[E], how much is left to learn (`engine/starvation.py`), NaN where that is
                  not known; None: nowhere
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
    """Rule or learned policy. `reset` comes before the first `act` of every episode.

    One that remembers anything from one `act` to the next, other than through the situation, also
    has `state_dict()` and `load_state_dict(state)`, with tensors and plain values, so that an
    episode can be taken up where it was left.
    """

    name: str

    def reset(self, n_envs: int) -> None: ...

    def act(self, situation: Situation) -> np.ndarray:
        """int64 [E, 4] in the order of HEAD_NAMES; every row legal, irrelevant heads 0."""
        ...


@runtime_checkable
class GivesReasons(Protocol):
    """A controller that can say what stood behind its decisions."""

    def reasons(self, actions: np.ndarray) -> list[Decided]:
        """Of the situation that `act` was last asked about, and what was done in it: an event for
        each environment that runs."""
        ...


def wait(n_envs: int) -> np.ndarray:
    """The action WAIT for every environment."""
    actions = np.zeros((n_envs, len(HEAD_NAMES)), dtype=np.int64)
    actions[:, OP] = LifecycleOp.WAIT
    return actions
