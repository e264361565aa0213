"""Follows E host trainings and tells when they plateau and when they have settled."""

import numpy as np

from esper.leyline import TrainingSignals
from esper.leyline import constants as c

HISTORY = 5
# The median of |x - 2y + z| of normal numbers, in their deviations: 0.6745 * sqrt(1 + 4 + 1).
SECOND_DIFFERENCE = 1.6522


def score_noise(scores: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """[E]: how much scores ([E, T], oldest first, NaN where not measured) vary by chance.

    It has the unit of the scores, and does not change when they are shifted: the median second
    difference of the last epochs, which a steady rise does not enter. A curve may be smoother than
    it is meaningful, so it is at least a share of the spread of all scores, and at least `chance`
    ([E]), where the error of a single score is known. NaN before the third score otherwise.
    """
    bends = np.abs(np.diff(scores[:, -c.SIGNAL_HISTORY_WINDOW :], n=2, axis=1))
    noise = np.full(len(scores), np.nan)
    known = np.flatnonzero(~np.isnan(bends).all(axis=1))
    if len(known):
        spread = _quartile(scores[known], 0.75) - _quartile(scores[known], 0.25)
        noise[known] = np.nanmedian(bends[known], axis=1) / SECOND_DIFFERENCE
        noise[known] = np.maximum(noise[known], c.NOISE_OF_SPREAD * spread)
    return np.fmax(noise, chance)


def _quartile(scores: np.ndarray, share: float) -> np.ndarray:
    """[E]: as `np.nanquantile` along rows, which takes them one by one and 50 times as long."""
    place = share * ((~np.isnan(scores)).sum(axis=1, keepdims=True) - 1)
    below = np.floor(place).astype(np.int64)
    ordered = np.sort(scores, axis=1)  # NaN last
    low = np.take_along_axis(ordered, below, axis=1)
    high = np.take_along_axis(ordered, np.ceil(place).astype(np.int64), axis=1)
    return np.asarray((low + (high - low) * (place - below))[:, 0])


class SignalTracker:
    """Call `update` once after every epoch with what was measured, [E] arrays.

    A plateau counts the epochs since the best score last rose by `plateau_rise` times the score's
    noise, which is `noise` [E]. The stabilisation latch opens after `stabilization_epochs` epochs
    in a row whose validation loss neither fell by `stabilization_threshold` of itself nor jumped;
    0 opens it from the start. It never closes again before `reset`.
    """

    def __init__(
        self,
        n_envs: int,
        plateau_rise: float = c.PLATEAU_RISE,
        stabilization_threshold: float = c.STABILIZATION_THRESHOLD,
        stabilization_epochs: int = c.STABILIZATION_EPOCHS,
    ) -> None:
        self.n_envs = n_envs
        self.plateau_rise = plateau_rise
        self.stabilization_threshold = stabilization_threshold
        self.stabilization_epochs = stabilization_epochs
        self.reset()

    def reset(self) -> None:
        shape = (self.n_envs,)
        self.plateau = np.zeros(shape, dtype=np.int64)
        self.plateau_base = np.full(shape, np.nan)
        self.stable = np.zeros(shape, dtype=np.int64)
        self.stabilized = np.full(shape, self.stabilization_epochs == 0)
        self.best_score = np.full(shape, np.nan)
        self.best_loss = np.full(shape, np.nan)
        self.noise = np.full(shape, np.nan)
        self.losses = np.full((self.n_envs, HISTORY), np.nan)
        self.scores = np.full((self.n_envs, HISTORY), np.nan)  # all of them, after these

    def update(
        self,
        epoch: int,
        global_step: int,
        train_loss: np.ndarray,
        train_score: np.ndarray,
        val_loss: np.ndarray,
        val_score: np.ndarray,
        chance: np.ndarray | None = None,
    ) -> TrainingSignals:
        """`chance` is the error of each score, where that is known."""
        previous_loss = self.losses[:, -1]
        loss_delta = previous_loss - val_loss
        score_delta = val_score - self.scores[:, -1]
        self.scores = np.concatenate([self.scores, val_score[:, None]], axis=1)
        unknown = np.full(self.n_envs, np.nan)
        self.noise = score_noise(self.scores, unknown if chance is None else chance)
        self._watch_plateau(val_score)
        self._watch_stability(loss_delta, previous_loss, val_loss)
        self.best_score = np.fmax(self.best_score, val_score)
        self.best_loss = np.fmin(self.best_loss, val_loss)
        self.losses = np.concatenate([self.losses[:, 1:], val_loss[:, None]], axis=1)
        return TrainingSignals(
            epoch=np.full(self.n_envs, epoch),
            global_step=np.full(self.n_envs, global_step),
            train_loss=train_loss,
            val_loss=val_loss,
            loss_delta=loss_delta,
            train_score=train_score,
            val_score=val_score,
            score_delta=score_delta,
            plateau_epochs=self.plateau,
            host_stabilized=self.stabilized,
            best_val_score=self.best_score,
            best_val_loss=self.best_loss,
            loss_history=self.losses,
            score_history=self.scores[:, -HISTORY:],
        )

    def _watch_plateau(self, score: np.ndarray) -> None:
        # Against the best so far, not the last epoch: noise alone would look like progress.
        rose = ~(score <= self.plateau_base + self.plateau_rise * self.noise)
        self.plateau_base = np.where(rose, score, self.plateau_base)
        self.plateau = np.where(rose, 0, self.plateau + 1)

    def _watch_stability(
        self, loss_delta: np.ndarray, previous: np.ndarray, loss: np.ndarray
    ) -> None:
        # Comparisons with NaN, before the first epoch or after a fault, are False.
        stable = (
            (previous > 1e-8)
            & (loss_delta < self.stabilization_threshold * previous)
            & (loss < c.STABILIZATION_SPIKE * previous)
        )
        self.stable = np.where(stable, self.stable + 1, 0)
        self.stabilized = self.stabilized | (self.stable >= self.stabilization_epochs)
