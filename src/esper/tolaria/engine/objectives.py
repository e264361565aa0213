"""Losses and scores by name: functions of (output, target) that average over the batch.

Higher scores are better. Those here are percentages, which learned policies expect; nothing else
depends on the scale of a score. They take the output of a network as it is: a tensor, or an object
with one.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.growth.nested import tensors_in
from esper.leyline import ConfigError

Objective = Callable[[Any, Any], Tensor]
# Targets that are not counted, as in torch's cross entropy.
IGNORED = -100


def prediction(output: Any) -> Tensor:
    """The main tensor of an output: itself, its `logits`, or the first tensor in it."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", None) if logits is None else logits
    found = logits if isinstance(logits, Tensor) else next(tensors_in(output), None)
    if found is None:
        raise TypeError(f"an output of type {type(output).__name__} holds no tensor")
    return found


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    """For classes (B, K) and, with targets (B, T), for every position of (B, T, K)."""
    return F.cross_entropy(prediction(output).flatten(0, -2), target.flatten())


def mse(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(prediction(output), target)


def bce_with_logits(output: Any, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(prediction(output), target)


def accuracy(output: Any, target: Tensor) -> Tensor:
    """Percentage of right classes (or tokens); targets of -100 are ignored."""
    right = prediction(output).argmax(dim=-1) == target
    return 100.0 * (right.sum() / (target != IGNORED).sum())


def binary_accuracy(output: Any, target: Tensor) -> Tensor:
    return 100.0 * ((prediction(output) > 0) == (target > 0.5)).float().mean()


def negative_mse(output: Any, target: Tensor) -> Tensor:
    """-100 times the mean squared error; targets should have a variance of about one."""
    return -100.0 * F.mse_loss(prediction(output), target)


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

# Output and target must have the same shape, or torch broadcasts them.
ELEMENTWISE = (mse, bce_with_logits, negative_mse, binary_accuracy)
# Scores that are the percentage of right answers.
PERCENTAGES = (accuracy, binary_accuracy)


def find_objective(kind: str, value: str | Objective, known: dict[str, Objective]) -> Objective:
    """`value` if it is callable, else the objective of that name. Raises ConfigError."""
    if callable(value):
        return value
    if value not in known:
        raise ConfigError(
            f"no {kind} {value!r}; there are {', '.join(known)}, or give a callable(output, target)"
        )
    return known[value]


def check_fit(loss: Objective, score: Objective, output: Any, target: Any) -> None:
    """Raises ConfigError where torch would compute a meaningless number."""
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
    """The loss of random guessing, if known: ln(classes) for cross entropy."""
    if loss is cross_entropy and outputs is not None and outputs > 1:
        return math.log(outputs)
    return None


def answers_per_sample(score: Objective, target: Any) -> int | None:
    """The number of answers per example, if the score is a percentage of right answers."""
    known = isinstance(target, Tensor) and score in PERCENTAGES
    return target[0].numel() if known else None


def standard_error(percentage: np.ndarray, answers: int) -> np.ndarray:
    """The standard error of a percentage of right answers; NaN for no answers. One more right and
    wrong answer keep it above 0 (Laplace's rule of succession)."""
    if answers == 0:
        return np.full(percentage.shape, np.nan)
    share = (percentage / 100.0 * answers + 1.0) / (answers + 2.0)
    return np.asarray(100.0 * np.sqrt(share * (1.0 - share) / answers))


# --- scores of a whole data set ---------------------------------------------------------------


class WholeSetScore:
    """A score that is no mean over batches, such as F1, AUC or R2: a function of all outputs and
    all targets, or an object with `reset`, `update` and `compute`, as in torchmetrics. Training is
    not scored (NaN)."""

    def __init__(self, score: Any) -> None:
        self.score = score

    def __call__(self, output: Any, target: Any) -> Tensor:
        device = next((tensor.device for tensor in tensors_in(output)), None)
        return torch.tensor(math.nan, device=device)

    def tally(self) -> "Tally":
        """For one pass over the data."""
        return Tally(self.score)


class Tally:
    def __init__(self, score: Any) -> None:
        self.batches: list[tuple[Any, Any]] = []
        self.meter = None
        self.score = score
        if all(hasattr(score, name) for name in ("reset", "update", "compute")):
            self.meter = copy.deepcopy(score)
            self.meter.reset()

    def add(self, output: Any, target: Any) -> None:
        if self.meter is None:
            self.batches.append((output, target))
        else:
            self.meter.update(output, target)

    def result(self) -> float:
        """The score; raises ConfigError if it is not one number."""
        if self.meter is None:
            outputs, targets = zip(*self.batches, strict=True)
            value = self.score(joined(outputs), joined(targets))
        else:
            value = self.meter.compute()
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                "the score must return one number for all outputs and targets; it returned "
                f"{type(value).__name__}"
            ) from error


def joined(batches: tuple[Any, ...]) -> Any:
    """Batches joined into one: tensors, also those in dicts, tuples and dataclasses."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches) if first.dim() else torch.stack(batches)
    if isinstance(first, Mapping):
        return {key: joined(tuple(batch[key] for batch in batches)) for key in first}
    if isinstance(first, tuple):
        entries = [joined(entries) for entries in zip(*batches, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else tuple(entries)
    if isinstance(first, list):
        return [entry for batch in batches for entry in batch]
    if is_dataclass(first) and not isinstance(first, type):
        own = {f.name: joined(tuple(getattr(b, f.name) for b in batches)) for f in fields(first)}
        return replace(first, **own)
    return first
