"""A cap on what a run may spend: what its next epoch costs, and whether that can still be paid."""

from collections.abc import Sequence

import numpy as np

from esper.growth.slot_table import SlotTable
from esper.leyline import IS_ACTIVE, IS_BLENDED, ConfigError
from esper.tolaria.engine.batches import DataSize
from esper.tolaria.engine.garden import TRAINING_COST, Garden, SavedHost

Best = Sequence[SavedHost | None]


class ComputeBudget:
    """What E hosts may spend, each `max_macs` in all; None for no limit.

    `size` says what a first epoch takes, later on it is known. `best` are the hosts as they would
    be settled. An epoch is paid for only if what may come after it is too: an evaluation of what a
    rollback brings back, and the two evaluations of settling.
    """

    def __init__(self, garden: Garden, max_macs: int | None, size: DataSize | None) -> None:
        self.garden, self.max_macs = garden, max_macs
        known = (0, 0) if size is None else (size.train or 0, size.val or 0)
        # Examples of an epoch and of an evaluation; 0 if not known.
        self.samples = np.array(known, dtype=np.int64)

    def note(self, trained: int, evaluated: int) -> None:
        """Examples that an epoch was trained on, and evaluated."""
        self.samples = np.array([trained or self.samples[0], evaluated], dtype=np.int64)

    # --- what things cost, in multiply-adds ----------------------------------------------------

    def training(self) -> np.ndarray:
        """int[E]: the next epoch of hosts as they are."""
        active = _active(self.garden.table).sum(axis=1)
        return np.asarray(TRAINING_COST * self.samples[0] * (self.garden.host_macs + active))

    def evaluation(self) -> np.ndarray:
        """int[E]: an evaluation of hosts as they are, with all that is left out of them."""
        return np.asarray(self.samples[1] * _evaluation(self.garden, self.garden.table))

    def reserve(self, evaluation: np.ndarray, best: Best) -> np.ndarray:
        """[E, ...]: what may come after an epoch of networks whose `evaluation` costs that."""
        rows = [0 if each is None else _evaluation(self.garden, each.row)[0] for each in best]
        before = self.samples[1] * np.array(rows).reshape(-1, *[1] * (evaluation.ndim - 1))
        return np.asarray(evaluation + 2 * np.maximum(evaluation, before))

    # --- what is left --------------------------------------------------------------------------

    def affords(self, best: Best, more: int | np.ndarray = 0) -> np.ndarray:
        """bool[E]: is another epoch paid for, after `more` multiply-adds for something else?"""
        if self.max_macs is None:
            return np.ones(len(best), dtype=bool)
        evaluation = self.evaluation()
        needed = self.training() + evaluation + self.reserve(evaluation, best)
        return np.asarray(self._left() - more >= needed)

    def affords_seed(self, best: Best, more: int | np.ndarray = 0) -> np.ndarray | None:
        """bool[E, S, B]: is another epoch paid for if this is germinated, after `more`? None if all
        that `affords` it may: a seed that is isolated costs nothing in its first epoch."""
        garden = self.garden
        if self.max_macs is None or garden.rules.incubation == "isolated":
            return None
        seed = garden.limits.macs[None]
        acting = IS_BLENDED[garden.table.stage].sum(axis=1)
        whole = garden.host_macs + _active(garden.table).sum(axis=1)
        passes = (1 + garden.counterfactuals * acting)[:, None, None] * seed
        passes = passes + garden.counterfactuals * whole[:, None, None]
        evaluation = self.evaluation()[:, None, None] + self.samples[1] * passes
        training = self.training()[:, None, None] + TRAINING_COST * self.samples[0] * seed
        needed = training + evaluation + self.reserve(evaluation, best)
        return np.asarray((self._left() - more)[:, None, None] >= needed)

    def epochs(self, best: Best) -> np.ndarray:
        """int[E]: how many epochs are paid for if hosts stay as they are."""
        evaluation = self.evaluation()
        left = self._left() - self.reserve(evaluation, best)
        return np.asarray(left // np.maximum(self.training() + evaluation, 1))

    def share_left(self, steps_done: float) -> np.ndarray:
        """[E]: the share of the run that is left, see `Situation`."""
        left = np.full(len(self.garden.train_macs), 1.0 - steps_done)
        if self.max_macs is not None:
            left = np.minimum(left, self._left() / self.max_macs)
        return np.maximum(left, 0.0)

    def _left(self) -> np.ndarray:
        assert self.max_macs is not None
        return self.max_macs - self.garden.train_macs

    def check_first_epoch(self, *, looks: bool) -> None:
        """Raises ConfigError if the budget does not even pay for a first epoch; `looks`: hosts are
        evaluated before it."""
        if self.max_macs is None:
            return
        evaluation = self.evaluation()
        reserve = self.reserve(evaluation, [None] * len(evaluation))
        needed = int((self.training() + evaluation * (2 if looks else 1) + reserve).max())
        if self.max_macs < needed:
            raise ConfigError(
                f"max_train_macs={self.max_macs} does not pay for one epoch with its evaluations, "
                f"which takes {needed}; give that or more"
            )


def _active(table: SlotTable) -> np.ndarray:
    return np.where(IS_ACTIVE[table.stage], table.macs, 0)


def _evaluation(garden: Garden, table: SlotTable) -> np.ndarray:
    """Multiply-adds per example of what `Garden.evaluate` runs for each row of the table."""
    active = _active(table)
    whole = garden.host_macs + active.sum(axis=1)
    without = np.where(IS_BLENDED[table.stage], whole[:, None] - active, 0)
    return np.asarray(whole + garden.counterfactuals * without.sum(axis=1))
