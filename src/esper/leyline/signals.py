"""What is known about the training of each host after a step: arrays over environments."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TrainingSignals:
    """State of E host trainings. Scores are in their own units; NaN means not measured.

    All arrays are [E] but the histories, which are [E, 5], oldest first, NaN before the start.
    `loss_delta` and `score_delta` are positive when things got better.
    """

    epoch: np.ndarray
    global_step: np.ndarray
    train_loss: np.ndarray
    val_loss: np.ndarray
    loss_delta: np.ndarray
    train_score: np.ndarray
    val_score: np.ndarray
    score_delta: np.ndarray
    plateau_epochs: np.ndarray
    host_stabilized: np.ndarray
    best_val_score: np.ndarray
    best_val_loss: np.ndarray
    loss_history: np.ndarray
    score_history: np.ndarray
