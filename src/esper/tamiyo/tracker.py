"""Follows E host trainings and tells when they plateau and when they have settled."""

import numpy as np

from esper.leyline import TrainingSignals
from esper.leyline import constants as c

HISTORY = 5


class SignalTracker:
    """Call `update` once after every epoch with what was measured, [E] arrays.

    A plateau counts the epochs since the best score last rose by `plateau_threshold`. The
    stabilisation latch opens after `stabilization_epochs` epochs in a row whose validation loss
    neither fell by `stabilization_threshold` of itself nor jumped; 0 opens it from the start. It
    never closes again before `reset`.
    """

    def __init__(
        self,
        n_envs: int,
        plateau_threshold: float = c.PLATEAU_THRESHOLD_PP,
        stabilization_threshold: float = c.STABILIZATION_THRESHOLD,
        stabilization_epochs: int = c.STABILIZATION_EPOCHS,
    ) -> None:
        self.n_envs = n_envs
        self.plateau_threshold = plateau_threshold
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
        window = (self.n_envs, c.SIGNAL_HISTORY_WINDOW)
        self.losses = np.full(window, np.nan)
        self.scores = np.full(window, np.nan)

    def update(
        self,
        epoch: int,
        global_step: int,
        train_loss: np.ndarray,
        train_score: np.ndarray,
        val_loss: np.ndarray,
        val_score: np.ndarray,
    ) -> TrainingSignals:
        previous_loss = self.losses[:, -1]
        loss_delta = previous_loss - val_loss
        score_delta = val_score - self.scores[:, -1]
        self._watch_plateau(val_score)
        self._watch_stability(loss_delta, previous_loss, val_loss)
        self.best_score = np.fmax(self.best_score, val_score)
        self.best_loss = np.fmin(self.best_loss, val_loss)
        self.losses = np.concatenate([self.losses[:, 1:], val_loss[:, None]], axis=1)
        self.scores = np.concatenate([self.scores[:, 1:], val_score[:, None]], axis=1)
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
            loss_history=self.losses[:, -HISTORY:],
            score_history=self.scores[:, -HISTORY:],
        )

    def _watch_plateau(self, score: np.ndarray) -> None:
        # Against the best so far, not the last epoch: noise alone would look like progress.
        rose = ~(score < self.plateau_base + self.plateau_threshold)
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
