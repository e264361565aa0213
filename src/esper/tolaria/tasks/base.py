"""The class `Task`: data, a host with slots, and how to train it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from esper.growth.blueprints.catalogue import BlueprintCatalogue, default_catalogue
from esper.growth.devices import input_device, on_device
from esper.growth.sites import evaluating
from esper.leyline import ConfigError
from esper.leyline.growth_settings import RateSchedule
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.batches import VAL_BATCH, TensorSource
from esper.tolaria.engine.objectives import Objective, accuracy, cross_entropy
from esper.tolaria.engine.recipe import HostRecipe, Precision, target_for


@dataclass(frozen=True)
class Task:
    """See `built_in` for examples.

    data_set  name in the catalogue (`esper data list`), or any other for data of your own
    load      reads the data from the data folder; raises DataMissingError if it is not there
    build     makes the host; `slots` are the names of its modules after which it can grow
    steps     default number of epochs; an epoch is a pass over the training data, or
              `batches_per_epoch` batches of it
    batch, val_batch  examples per batch in training and in evaluation
    schedule  of the learning rate; None for a constant one
    host_of_width, widths  optional: narrower and wider hosts, among which an evaluation finds the
              best static network
    host_of_widths, shape  optional: hosts by the width of every layer, and the widths of `build`
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
        for make, sizes in (("host_of_width", "widths"), ("host_of_widths", "shape")):
            if (getattr(self, make) is None) != (not getattr(self, sizes)):
                raise ConfigError(f"give task {self.name!r} both {make} and {sizes}, or neither")

    def adjusted(self, slots: str | None = None, batch: int | None = None) -> "Task":
        """With other slots, as names separated by commas, and another batch; None keeps them."""
        if batch is not None and batch < 1:
            raise ConfigError(f"batch must be at least 1, got {batch}")
        names = self.slots if slots is None else tuple(name.strip() for name in slots.split(","))
        if len(set(names)) < len(names):
            raise ConfigError(f"slots={slots!r} names a module twice; leave one out")
        return replace(self, slots=names, batch=self.batch if batch is None else batch)

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        # One kernel for all parameters: saves a fifth of the training time of a small host.
        return AdamW(params, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)

    def score_on(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
        """Mean score of a network over examples."""
        device, size, scores = input_device(model), self.val_batch, list[Tensor]()
        parts = inputs.split(size)
        with evaluating(model):
            for x, y in zip(parts, targets.split(size), strict=True):
                output = model(on_device(x, device))
                scores.append(self.score(output, target_for(output, y)))
        found = torch.stack(scores).tolist()
        return sum(s * len(x) for s, x in zip(found, parts, strict=True)) / len(inputs)

    def recipe(self, data: DataSplits, catalogue: BlueprintCatalogue | None = None) -> HostRecipe:
        """How to make and train a host on the training and validation splits of `data`. The default
        catalogue has all installed blueprints."""
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
    """Slots after every `stride`-th block of a host."""
    return tuple(f"blocks.{(i + 1) * stride - 1}" for i in range(count))
