"""Losses and scores by name: functions of (output, target) that average over the batch.

Higher scores are better. Those here are percentages, which learned policies expect; nothing else
depends on the scale of a score. They take the output of a network as it is: a tensor, or an object
with one.
"""

import copy
import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.growth.outputs import tensors_in
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


def has_tensor(output: Any) -> bool:
    return next(tensors_in(output), None) is not None


def class_axes(output: Any, target: Tensor) -> list[int]:
    """The dimensions of an output, 1 or -1, that its classes may have by the shape of targets."""
    shape = prediction(output).shape
    if len(shape) == 2:  # also for targets (B, 1), and (B, T) where the model joins both
        return [-1] if target.numel() == shape[0] else []
    rest = {} if len(shape) < 2 else {1: shape[:1] + shape[2:], -1: shape[:-1]}
    return [axis for axis, size in rest.items() if size == target.shape]


def by_class(output: Any, target: Tensor, axis: int | None = None) -> tuple[Tensor, Tensor]:
    """Outputs [N, K] and classes [N]. Classes are in dimension 1 of the output, as in torch, or in
    the last one, whichever fits the shape of the targets; `axis` (1 or -1) where both do.

    Raises ConfigError if neither does, or if both do and `axis` is not given.
    """
    found, fits = prediction(output), class_axes(output, target)
    shapes = f"outputs of shape {tuple(found.shape)}"
    if target.is_floating_point() or not fits:
        raise ConfigError(
            f"{shapes} do not fit class targets of shape {tuple(target.shape)} and type "
            f"{target.dtype}: give whole numbers, one for every position of an output that has its "
            "classes in dimension 1 or in the last one"
        )
    if len(fits) == 2 and axis is None:
        raise ConfigError(
            f"classes may be in dimension 1 or in the last one of {shapes}: give a loss and a "
            "score of your own, such as loss=torch.nn.functional.cross_entropy for dimension 1"
        )
    used = axis if axis in fits else fits[0]
    return found.movedim(used, -1).flatten(0, -2), target.flatten().long()


def cross_entropy(output: Any, target: Tensor, axis: int | None = None) -> Tensor:
    """For class indices in any shape that `by_class` takes; also for probabilities of classes, as
    torch has them."""
    found = prediction(output)
    if target.is_floating_point() and found.shape == target.shape:
        return F.cross_entropy(found, target)
    logits, classes = by_class(output, target, axis)
    try:
        return F.cross_entropy(logits, classes)
    except IndexError as error:
        raise ConfigError(
            f"the targets name classes up to {int(classes.max())} and down to "
            f"{int(classes[classes != IGNORED].min())}, but the model has {logits.shape[1]} "
            f"outputs, for classes 0 to {logits.shape[1] - 1}; correct the targets or the model"
        ) from error


def mse(output: Any, target: Tensor) -> Tensor:
    found = prediction(output)
    return F.mse_loss(found, target.to(found.dtype))


def bce_with_logits(output: Any, target: Tensor) -> Tensor:
    found = prediction(output)
    return F.binary_cross_entropy_with_logits(found, target.to(found.dtype))


def accuracy(output: Any, target: Tensor, axis: int | None = None) -> Tensor:
    """Percentage of right classes (or tokens); targets of -100 are ignored."""
    found = prediction(output)
    if target.is_floating_point() and found.shape == target.shape:
        return 100.0 * (found.argmax(1) == target.argmax(1)).float().mean()
    logits, classes = by_class(output, target, axis)
    return 100.0 * ((logits.argmax(dim=-1) == classes).sum() / (classes != IGNORED).sum())


def binary_accuracy(output: Any, target: Tensor) -> Tensor:
    return 100.0 * ((prediction(output) > 0) == (target > 0.5)).float().mean()


def negative_mse(output: Any, target: Tensor) -> Tensor:
    """-100 times the mean squared error; targets should have a variance of about one."""
    return -100.0 * mse(output, target)


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
# Those for which the dimension of classes matters.
BY_CLASS = (cross_entropy, accuracy)


def find_objective(kind: str, value: str | Objective, known: dict[str, Objective]) -> Objective:
    """`value` if it is callable, else the objective of that name. Raises ConfigError."""
    if callable(value):
        return value
    if value not in known:
        raise ConfigError(
            f"no {kind} {value!r}; there are {', '.join(known)}, or give a callable(output, target)"
        )
    return known[value]


def with_axis(objective: Objective, axis: int | None) -> Objective:
    """The objective for classes in that dimension; others than those of BY_CLASS stay the same."""
    known: Any = objective
    if axis is None or not any(objective is each for each in BY_CLASS):
        return objective
    return partial(known, axis=axis)


def named(objective: Objective) -> Any:
    """Without the axis that `with_axis` has fixed."""
    return objective.func if isinstance(objective, partial) else objective


def check_targets(loss: Objective, score: Objective, target: Any) -> None:
    """Raises ConfigError if objectives by name are given anything but a tensor of targets."""
    known = (*LOSSES.values(), *SCORES.values())
    for kind, objective in (("loss", loss), ("score", score)):
        if not isinstance(target, Tensor) and any(named(objective) is each for each in known):
            raise ConfigError(
                f"the {kind} {named(objective).__name__!r} needs targets as one tensor, got "
                f"{type(target).__name__}; convert them in the loader, or give {kind}= a callable"
            )


def check_fit(loss: Objective, score: Objective, output: Any, target: Any) -> None:
    """Raises ConfigError where torch would compute a meaningless number."""
    if not isinstance(target, Tensor) or not has_tensor(output):
        return
    found = prediction(output)
    for kind, objective in (("loss", named(loss)), ("score", named(score))):
        elementwise = any(objective is each for each in ELEMENTWISE)
        if objective is cross_entropy and target.is_floating_point():
            _check_probabilities(found, target)
        if objective is accuracy:
            _check_accuracy(found, target, named(loss) is cross_entropy)
        if elementwise and found.shape != target.shape:
            raise ConfigError(
                f"the {kind} does not fit the model's output and the targets: "
                f"{objective.__name__} compares them one by one, and their shapes are "
                f"{tuple(found.shape)} and {tuple(target.shape)}; reshape the targets"
            )
        if objective in (bce_with_logits, binary_accuracy) and _outside(target, 0.0, 1.0):
            raise ConfigError(
                f"the {kind} {objective.__name__} needs targets from 0 to 1, and they range from "
                f"{float(target.min()):g} to {float(target.max()):g}; rescale the targets"
            )


def _outside(target: Tensor, least: float, most: float) -> bool:
    return bool(((target < least) | (target > most)).any())


def _check_probabilities(output: Tensor, target: Tensor) -> None:
    if output.shape != target.shape or output.dim() < 2 or output.shape[1] < 2:
        return  # the loss itself refuses it
    totals = target.sum(dim=1)
    if _outside(target, 0.0, 1.0) or not torch.allclose(totals, torch.ones_like(totals), atol=1e-3):
        raise ConfigError(
            "cross_entropy takes targets of the output's shape as probabilities of classes, and "
            "these do not add up to 1; give class indices (whole numbers), or loss='mse'"
        )


def _check_accuracy(output: Tensor, target: Tensor, classes: bool) -> None:
    if target.is_floating_point() and not (classes and output.shape == target.shape):
        raise ConfigError(
            "the score 'accuracy' counts right classes, but the targets are numbers; give "
            "score='negative_mse', 'binary_accuracy' for targets of 0 and 1, or a callable"
        )
    if target.shape == output.shape and output.dim() > 1 and output.shape[1] > 1:
        if target.is_floating_point():
            return
        raise ConfigError(
            "the targets have the shape of the output, so they are no class indices; give "
            "targets.argmax(1), or probabilities as floating-point numbers"
        )
    if output.dim() < 2 or output.numel() == target.numel():
        raise ConfigError(
            "the score 'accuracy' takes the largest of several outputs, and the model has one; "
            "give score='binary_accuracy', or a callable"
        )


def random_guess_loss(loss: Objective, outputs: int | None) -> float | None:
    """The loss of random guessing, if known: ln(classes) for cross entropy."""
    if named(loss) is cross_entropy and outputs is not None and outputs > 1:
        return math.log(outputs)
    return None


def answers_per_sample(score: Objective, target: Any) -> int | None:
    """The number of answers per example, if the score is a percentage of right answers."""
    percentage = any(named(score) is each for each in PERCENTAGES)
    known = percentage and isinstance(target, Tensor)
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
        own = {key: joined(tuple(batch[key] for batch in batches)) for key in first}
        if type(first) is dict or not isinstance(first, MutableMapping):
            return own
        # Of the same type, so that scores read what losses read: attributes too, say.
        whole = copy.copy(first)
        for key, value in own.items():
            whole[key] = value
        return whole
    if isinstance(first, tuple):
        entries = [joined(entries) for entries in zip(*batches, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else tuple(entries)
    if isinstance(first, list):
        return [entry for batch in batches for entry in batch]
    if is_dataclass(first) and not isinstance(first, type):
        own = {f.name: joined(tuple(getattr(b, f.name) for b in batches)) for f in fields(first)}
        return replace(first, **own)
    return first
