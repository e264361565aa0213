"""A cap on what a run may spend: what its next epoch costs, and whether that can still be paid."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.growth import SlotTable
from esper.leyline import IS_ACTIVE, IS_BLENDED, ConfigError
from esper.tolaria.batches import DataSize
from esper.tolaria.garden import TRAINING_COST, Garden, SavedHost


@dataclass(frozen=True)
class Costs:
    """Multiply-adds of each host as it is now, int[E].

    epoch    its training and its evaluation, with all that is left out to measure its seeds
    reserve  what may come after that: an evaluation of what a rollback brings back, and the two of
             settling
    """

    epoch: np.ndarray
    reserve: np.ndarray


class Purse:
    """What E hosts may spend, each `max_macs` in all; None for no limit. `size` says what a first
    epoch takes; later on it is known."""

    def __init__(self, garden: Garden, max_macs: int | None, size: DataSize | None) -> None:
        self.garden, self.max_macs = garden, max_macs
        known = (0, 0) if size is None else (size.train or 0, size.val or 0)
        # Examples of an epoch and of an evaluation; 0 if not known.
        self.samples = np.array(known, dtype=np.int64)

    def note(self, trained: int, evaluated: int) -> None:
        """Examples that an epoch was trained on, and evaluated."""
        self.samples = np.array([trained or self.samples[0], evaluated], dtype=np.int64)

    def costs(self, best: Sequence[SavedHost | None]) -> Costs:
        """Hosts are settled as they are in `best`, or as they will be after the next epoch."""
        trained, evaluated = self.samples.tolist()
        garden = self.garden
        per_example = garden.host_macs + _active(garden.table).sum(axis=1)
        evaluation = evaluated * _evaluation(garden, garden.table)
        settled = evaluation.copy()
        for env, saved in enumerate(best):
            if saved is not None:
                known = evaluated * _evaluation(garden, saved.row)
                settled[env] = max(settled[env], known[0])
        training = TRAINING_COST * trained * per_example
        return Costs(training + evaluation, evaluation + 2 * settled)

    def affords(self, best: Sequence[SavedHost | None], more: int | np.ndarray = 0) -> np.ndarray:
        """bool[E]: is another epoch paid for, after `more` multiply-adds for something else?"""
        if self.max_macs is None:
            return np.ones(len(best), dtype=bool)
        now = self.costs(best)
        return np.asarray(self._left() - more >= now.epoch + now.reserve)

    def epochs(self, best: Sequence[SavedHost | None]) -> np.ndarray:
        """int[E]: how many epochs are paid for if hosts stay as they are."""
        now = self.costs(best)
        return np.asarray((self._left() - now.reserve) // np.maximum(now.epoch, 1))

    def left(self, steps_done: float) -> np.ndarray:
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
        now = self.costs([None] * len(self.garden.train_macs))
        evaluation = now.reserve // 3
        needed = int((now.epoch + now.reserve + looks * evaluation).max())
        if self.max_macs < needed:
            raise ConfigError(
                f"max_macs={self.max_macs} does not pay for one epoch with its evaluations, which "
                f"takes {needed}; give that or more"
            )


def _active(table: SlotTable) -> np.ndarray:
    return np.where(IS_ACTIVE[table.stage], table.macs, 0)


def _evaluation(garden: Garden, table: SlotTable) -> np.ndarray:
    """Multiply-adds per example of what `Garden.evaluate` runs for each row of the table."""
    active = _active(table)
    whole = garden.host_macs + active.sum(axis=-1)
    without = np.where(IS_BLENDED[table.stage], whole[..., None] - active, 0)
    return np.asarray(whole + garden.counterfactuals * without.sum(axis=-1))
