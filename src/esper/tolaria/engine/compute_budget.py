"""A cap on the compute of a run: what the next epoch costs, and whether the budget covers it."""

from collections.abc import Sequence

import numpy as np

from esper.growth.slot_table import SlotTable
from esper.leyline import ConfigError
from esper.tolaria.engine.batches import DataSize
from esper.tolaria.engine.garden import TRAINING_COST, Garden, SavedHost

Best = Sequence[SavedHost | None]


class ComputeBudget:
    """The compute budget of E hosts: `max_macs` multiply-adds for each, None for no limit.

    `size` is the size of a first epoch; later ones are measured. `best` are the best hosts so far,
    which settling evaluates. The budget covers an epoch only if it also covers what may follow: an
    evaluation after a rollback, and one of settling, without unproven seeds.
    """

    def __init__(self, garden: Garden, max_macs: int | None, size: DataSize | None) -> None:
        self.garden, self.max_macs = garden, max_macs
        known = (0, 0) if size is None else (size.train or 0, size.val or 0)
        # Examples of an epoch and of an evaluation; 0 if not known.
        self.samples = np.array(known, dtype=np.int64)

    def note(self, trained: int, evaluated: int) -> None:
        """Record how many examples an epoch was trained and evaluated on."""
        self.samples = np.array([trained or self.samples[0], evaluated], dtype=np.int64)

    def training(self) -> np.ndarray:
        """int[E]: multiply-adds of the next epoch of the current hosts."""
        active = self.garden.table.active_macs.sum(axis=1)
        return np.asarray(TRAINING_COST * self.samples[0] * (self.garden.host_macs + active))

    def evaluation(self) -> np.ndarray:
        """int[E]: multiply-adds of an evaluation of the current hosts, with counterfactuals."""
        return np.asarray(self.samples[1] * _evaluation(self.garden, self.garden.table))

    def reserve(self, evaluation: np.ndarray, best: Best) -> np.ndarray:
        """[E, ...]: the cost of what may follow an epoch, for this cost of an `evaluation`."""
        rows = [0 if each is None else _evaluation(self.garden, each.row)[0] for each in best]
        before = self.samples[1] * np.array(rows).reshape(-1, *[1] * (evaluation.ndim - 1))
        return np.asarray(evaluation + np.maximum(evaluation, before))

    def affords(self, best: Best, more: int | np.ndarray = 0) -> np.ndarray:
        """bool[E]: whether the budget covers another epoch, after `more` multiply-adds."""
        if self.max_macs is None:
            return np.ones(len(best), dtype=bool)
        evaluation = self.evaluation()
        needed = self.training() + evaluation + self.reserve(evaluation, best)
        return np.asarray(self._left() - more >= needed)

    def affords_seed(self, best: Best, more: int | np.ndarray = 0) -> np.ndarray | None:
        """bool[E, S, B]: whether the budget covers another epoch with this seed, after `more`. None
        if seeds make no difference: an isolated seed costs nothing in its first epoch."""
        garden = self.garden
        acts = garden.acts_from_start.any() or garden.settings.seeds_incubate == "joint"
        if self.max_macs is None or not acts:
            return None
        seed = garden.limits.macs[None]
        measured = garden.left_out(garden.table).sum(axis=1)
        whole = garden.host_macs + garden.table.active_macs.sum(axis=1)
        passes = (1 + measured)[:, None, None] * seed
        if garden.settings.counterfactuals != "none":
            passes = passes + whole[:, None, None]
        evaluation = self.evaluation()[:, None, None] + self.samples[1] * passes
        training = self.training()[:, None, None] + TRAINING_COST * self.samples[0] * seed
        needed = training + evaluation + self.reserve(evaluation, best)
        return np.asarray((self._left() - more)[:, None, None] >= needed)

    def epochs(self, best: Best) -> np.ndarray:
        """int[E]: how many epochs of the current hosts the budget covers."""
        evaluation = self.evaluation()
        left = self._left() - self.reserve(evaluation, best)
        return np.asarray(left // np.maximum(self.training() + evaluation, 1))

    def share_left(self, steps_done: float) -> np.ndarray:
        """[E]: the fraction of the run that is left, see `Situation`."""
        left = np.full(len(self.garden.train_macs), 1.0 - steps_done)
        if self.max_macs is not None:
            left = np.minimum(left, self._left() / self.max_macs)
        return np.maximum(left, 0.0)

    def _left(self) -> np.ndarray:
        assert self.max_macs is not None
        return self.max_macs - self.garden.train_macs

    def check_first_epoch(self, *, evaluated_before: bool) -> None:
        """Raises ConfigError if the budget does not cover a first epoch."""
        if self.max_macs is None:
            return
        evaluation = self.evaluation()
        reserve = self.reserve(evaluation, [None] * len(evaluation))
        needed = int(
            (self.training() + evaluation * (2 if evaluated_before else 1) + reserve).max()
        )
        if self.max_macs < needed:
            raise ConfigError(
                f"max_train_macs={self.max_macs} does not cover one epoch with its evaluations, "
                f"which need {needed}; give at least that"
            )


def _evaluation(garden: Garden, table: SlotTable) -> np.ndarray:
    """Multiply-adds per example of `Garden.evaluate`, for each row of the table."""
    active = table.active_macs
    whole = garden.host_macs + active.sum(axis=1)
    without = np.where(garden.left_out(table), whole[:, None] - active, 0)
    return np.asarray(whole + without.sum(axis=1))
