"""What a task is: data, a host with slots, and how to train it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from esper.growth.blueprints.catalogue import BlueprintCatalogue, default_catalogue
from esper.growth.sites import evaluating
from esper.leyline import ConfigError
from esper.leyline.growth_settings import RateSchedule
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.batches import VAL_BATCH, TensorSource
from esper.tolaria.engine.objectives import Objective, accuracy, cross_entropy
from esper.tolaria.engine.recipe import HostRecipe, Precision


@dataclass(frozen=True)
class Task:
    """To add one, copy the smallest file beside this one and list it in `tasks/__init__`.

    data_set name of the data in the catalogue (`esper data list`), or of the task's own
    load     reads the data set from a folder; raises DataMissingError if it is not there
    build    makes the host; `slots` are the names of its modules where it can grow
    steps    epochs of a run unless the user says otherwise; an epoch is a pass over the training
             data, or `batches_per_epoch` batches of it
    batch, val_batch  examples per training step, and at a time when a network is evaluated
    schedule of the learning rate; None for a constant one
    host_of_width, widths  hosts of the same family, narrower and wider, for an evaluation to find
             the best static network; optional
    host_of_widths, shape  hosts of the family by the width of every layer, and the widths of the
             task's own host; optional
    """

    name: str
    description: str
    data_set: str
    load: Callable[[Path], DataSplits]
    build: Callable[[], nn.Module]
    slots: tuple[str, ...]
    steps: int
    batch: int
    learning_rate: float
    weight_decay: float = 0.0
    val_batch: int = VAL_BATCH
    batches_per_epoch: int | None = None
    max_grad_norm: float | None = None
    precision: Precision = "fp32"
    schedule: RateSchedule | None = None
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    loss: Objective = cross_entropy
    score: Objective = accuracy
    host_of_width: Callable[[int], nn.Module] | None = None
    widths: tuple[int, ...] = ()
    host_of_widths: Callable[[tuple[int, ...]], nn.Module] | None = None
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.host_of_width is None) != (not self.widths):
            raise ConfigError(
                f"task {self.name!r} must have both host_of_width and widths, or neither"
            )
        if (self.host_of_widths is None) != (not self.shape):
            raise ConfigError(
                f"task {self.name!r} must have both host_of_widths and shape, or neither"
            )

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        # One kernel for all parameters: a fifth of a small host's training time less.
        return AdamW(params, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)

    def score_on(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
        """Mean score of a finished network on a part of the data, weighted by examples."""
        total = 0.0
        with evaluating(model):
            size = self.val_batch
            for x, y in zip(inputs.split(size), targets.split(size), strict=True):
                total += float(self.score(model(x), y)) * len(x)
        return total / len(inputs)

    def recipe(self, data: DataSplits, catalogue: BlueprintCatalogue | None = None) -> HostRecipe:
        """How to make and train a host on the training and validation parts of `data`; without a
        catalogue, with all blueprints that are installed."""
        return HostRecipe(
            build=self.build,
            slots=self.slots,
            data=TensorSource(
                (data.train_x, data.train_y),
                (data.val_x, data.val_y),
                self.batch,
                self.augment,
                self.batches_per_epoch,
                self.val_batch,
            ),
            loss=self.loss,
            score=self.score,
            optimizer=self.optimizer,
            catalogue=catalogue or default_catalogue(),
            max_grad_norm=self.max_grad_norm,
            precision=self.precision,
        )


def block_slots(count: int, stride: int = 1) -> tuple[str, ...]:
    """Names of the blocks of a host after which it can grow: every `stride`-th."""
    return tuple(f"blocks.{(i + 1) * stride - 1}" for i in range(count))
