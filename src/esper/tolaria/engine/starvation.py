"""Starvation: how much a classifier can still learn from its training data (`rho`)."""

import math
from typing import Any

import torch
from torch import Tensor

from esper.leyline.constants import COOLING_STARVED, COOLING_TARGET
from esper.tolaria.engine.objectives import IGNORED, Objective, cross_entropy, prediction

# The first and then every STRIDE-th batch of an epoch is measured.
STRIDE = 4
# Steps of the bisection for tau: enough for float64.
HALVINGS = 60


def answers(output: Any, target: Any) -> tuple[Tensor, Tensor] | None:
    """Logits [N, K] and classes [N] of a batch, without ignored ones; None if this is no
    classification by class indices."""
    found = _classification(output, target)
    if found is None:
        return None
    logits, classes = found
    counted = classes != IGNORED
    return logits[counted], classes[counted]


def _classification(output: Any, target: Any) -> tuple[Tensor, Tensor] | None:
    """As `answers`, with those that are IGNORED."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    logits = prediction(output)
    if logits.dim() != target.dim() + 1 or logits.shape[-1] < 2:
        return None
    return logits.flatten(0, -2), target.flatten()


def starvation(logits: Tensor, classes: Tensor) -> Tensor:
    """rho: the mean of ||softmax(z) - onehot(y)||, the norm of the gradient of the loss by the
    logits [..., N, K], for classes [..., N] that are not IGNORED. Near 0 nothing is left to
    learn."""
    # Without selecting rows: a GPU would have to wait for their number.
    counted = classes != IGNORED
    gap = logits.softmax(dim=-1)
    right = torch.where(counted, classes, 0)[..., None]
    gap = gap.scatter_add(-1, right, -torch.ones_like(gap[..., :1]))
    return torch.where(counted, gap.norm(dim=-1), 0.0).sum(dim=-1) / counted.sum(dim=-1)


def find_tau(logits: Tensor, classes: Tensor) -> tuple[float, float]:
    """(rho, tau) of logits [N, K]: for a starved host tau is the factor with which rho becomes
    COOLING_TARGET, else 1. It always exists: with the factor 0 rho is sqrt(1 - 1/K)."""
    # On the CPU: the bisection would wait for a GPU in every step, and MPS has no float64.
    logits, classes = logits.cpu().double(), classes.cpu()
    rho = float(starvation(logits, classes))
    if not rho < COOLING_STARVED:
        return rho, 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if float(starvation(middle * logits, classes)) >= COOLING_TARGET:
            low = middle
        else:
            high = middle
    return rho, high


def can_starve(loss: Objective) -> bool:
    """Whether this is the loss of a classification."""
    return loss is cross_entropy


def batch_rho(loss: Objective, output: Any, target: Any) -> Tensor:
    """rho of a training batch; NaN if it is not defined."""
    found = _classification(output, target) if can_starve(loss) else None
    if found is None:
        return torch.tensor(math.nan)
    return starvation(found[0].detach().float(), found[1])
