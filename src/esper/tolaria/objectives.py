"""Losses and scores by name: functions of (output, target) that average over the batch.

A score is better when higher. Those here are percentages, which is what learned policies expect; to
everything else the scale of a score does not matter.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from esper.leyline import ConfigError

Objective = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """For classes (B, K) and, with targets (B, T), for every position of (B, T, K)."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def bce_with_logits(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Percentage of right classes (or tokens)."""
    return 100.0 * (output.argmax(dim=-1) == target).float().mean()


def binary_accuracy(output: Tensor, target: Tensor) -> Tensor:
    return 100.0 * ((output > 0) == (target > 0.5)).float().mean()


def negative_mse(output: Tensor, target: Tensor) -> Tensor:
    """-100 times the mean squared error: give targets a variance of about one."""
    return -100.0 * F.mse_loss(output, target)


LOSSES: dict[str, Objective] = {
    "cross_entropy": cross_entropy,
    "mse": mse,
    "bce_with_logits": bce_with_logits,
}
SCORES: dict[str, Objective] = {
    "accuracy": accuracy,
    "binary_accuracy": binary_accuracy,
    "negative_mse": negative_mse,
}

# Output and target must have one shape, or they are broadcast into nonsense.
ELEMENTWISE = (mse, bce_with_logits, negative_mse, binary_accuracy)
# Scores that are the percentage of right answers.
PERCENTAGES = (accuracy, binary_accuracy)


def find_objective(kind: str, value: str | Objective, known: dict[str, Objective]) -> Objective:
    """`value` itself if it can be called, else the one of that name; raises ConfigError."""
    if callable(value):
        return value
    if value not in known:
        raise ConfigError(
            f"no {kind} {value!r}; there are {', '.join(known)}, or give a callable(output, target)"
        )
    return known[value]


def check_fit(loss: Objective, score: Objective, output: Any, target: Any) -> None:
    """Raises ConfigError where torch would compute something that means nothing."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return
    if score is accuracy:
        _check_accuracy(output, target)
    for kind, objective in (("loss", loss), ("score", score)):
        if objective in ELEMENTWISE and output.shape != target.shape:
            raise ConfigError(
                f"the {kind} does not fit the model's output and the targets: "
                f"{objective.__name__} compares them one by one, and their shapes are "
                f"{tuple(output.shape)} and {tuple(target.shape)}; reshape the targets"
            )


def _check_accuracy(output: Tensor, target: Tensor) -> None:
    if target.is_floating_point():
        raise ConfigError(
            "the score 'accuracy' counts right classes, but the targets are numbers; give "
            "score='negative_mse', 'binary_accuracy' for targets of 0 and 1, or a callable"
        )
    if output.dim() == target.dim() or output.shape[-1] == 1:
        raise ConfigError(
            "the score 'accuracy' takes the largest of several outputs, and the model has one; "
            "give score='binary_accuracy', or a callable"
        )


def random_guess_loss(loss: Objective, outputs: int | None) -> float | None:
    """The loss of guessing at random, where that is known: ln(classes) for cross entropy."""
    if loss is cross_entropy and outputs is not None and outputs > 1:
        return math.log(outputs)
    return None


def answers_per_sample(score: Objective, target: Tensor) -> int | None:
    """How many right or wrong answers an entry of `target` stands for, if the score is the
    percentage of right ones."""
    return target[0].numel() if score in PERCENTAGES else None


def standard_error(percentage: np.ndarray, answers: int) -> np.ndarray:
    """Of a percentage of right answers; NaN for no answers. One right and one wrong answer more
    keep it above 0 where all or none are right (Laplace's rule of succession)."""
    if answers == 0:
        return np.full(percentage.shape, np.nan)
    share = (percentage / 100.0 * answers + 1.0) / (answers + 2.0)
    return np.asarray(100.0 * np.sqrt(share * (1.0 - share) / answers))
