"""The score of a finished network on a part of the data."""

from torch import Tensor, nn

from esper.growth import evaluating
from esper.tolaria.tasks.base import Task


def score_on(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> float:
    """Mean score, weighted by examples."""
    total = 0.0
    with evaluating(model):
        size = task.val_batch
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            total += float(task.score(model(x), y)) * len(x)
    return total / len(inputs)
