"""Losses and scores by name: functions of (output, target) that average over the batch.

A score is better when higher and on a 0-100 scale, which is what the gates' thresholds expect. The
named ones take a network's output as it comes: a tensor, or what holds one.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.growth import tensors_in
from esper.leyline import ConfigError

Objective = Callable[[Any, Any], Tensor]
# Targets that count neither as right nor as wrong, as for torch's cross entropy.
IGNORED = -100


def prediction(output: Any) -> Tensor:
    """The tensor that an output is about: itself, its `logits`, or the first tensor in it."""
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
    """Percentage of right classes (or tokens), of those that are not to be ignored (-100)."""
    right = prediction(output).argmax(dim=-1) == target
    return 100.0 * (right.sum() / (target != IGNORED).sum())


def binary_accuracy(output: Any, target: Tensor) -> Tensor:
    return 100.0 * ((prediction(output) > 0) == (target > 0.5)).float().mean()


def negative_mse(output: Any, target: Tensor) -> Tensor:
    """-100 times the mean squared error: give targets a variance of about one."""
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


def find_objective(kind: str, value: str | Objective, known: dict[str, Objective]) -> Objective:
    """`value` itself if it can be called, else the one of that name; raises ConfigError."""
    if callable(value):
        return value
    if value not in known:
        raise ConfigError(
            f"no {kind} {value!r}; there are {', '.join(known)}, or give a callable(output, target)"
        )
    return known[value]


def random_guess_loss(loss: Objective, outputs: int | None) -> float | None:
    """The loss of guessing at random, where that is known: ln(classes) for cross entropy."""
    if loss is cross_entropy and outputs is not None and outputs > 1:
        return math.log(outputs)
    return None


# --- scores of a whole data set ---------------------------------------------------------------


class WholeSetScore:
    """A score that is no mean over batches, such as F1, AUC or R2: a function of all outputs and
    all targets of a pass over the data, or an object with `reset`, `update` and `compute`, as those
    of torchmetrics are. Training, which has no such pass, is not scored."""

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
                f"the score must give one number for all outputs and targets; it gave "
                f"{type(value).__name__}"
            ) from error


def joined(parts: tuple[Any, ...]) -> Any:
    """Batches as one: tensors end to end, also those in dicts, tuples and dataclasses."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.dim() else torch.stack(parts)
    if isinstance(first, Mapping):
        return {key: joined(tuple(part[key] for part in parts)) for key in first}
    if isinstance(first, tuple):
        entries = [joined(entries) for entries in zip(*parts, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else tuple(entries)
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    if is_dataclass(first) and not isinstance(first, type):
        own = {f.name: joined(tuple(getattr(p, f.name) for p in parts)) for f in fields(first)}
        return replace(first, **own)
    return first
