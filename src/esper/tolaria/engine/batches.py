"""Sources of batches: tensors in memory, or loaders of the user."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from esper.growth.devices import has_room
from esper.growth.sites import CallInput, batch_size
from esper.leyline import ConfigError, EsperWarning

Batch = tuple[Any, Any]
# Changes only speed and memory.
VAL_BATCH = 512
# After so many batches a loader without a length may be endless.
LONG_EPOCH = 10_000


@dataclass(frozen=True)
class DataSize:
    """Batches and examples of an epoch, and examples of validation; None if not known. All batches
    of a loader are assumed to be as large as the first."""

    batches: int | None
    train: int | None
    val: int | None


class DataSource(Protocol):
    """Training batches for one epoch, in an order that depends on `key`; validation batches."""

    def train_batches(self, key: int) -> Iterator[Batch]: ...

    def val_batches(self) -> Iterator[Batch]: ...

    def example(self) -> Any:
        """One input, as the model receives it."""

    def size(self) -> DataSize: ...


class TensorSource:
    """Data in memory, shuffled every epoch.

    An epoch has at most `max_batches` batches, a random part of the data each time.
    `augment(inputs, generator)`, if given, changes a batch of training inputs, on their device; the
    generator is one of the CPU. Validation batches have `val_batch` examples.
    """

    def __init__(
        self,
        train: tuple[Tensor, Tensor],
        val: tuple[Tensor, Tensor],
        batch: int,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        max_batches: int | None = None,
        val_batch: int = VAL_BATCH,
    ) -> None:
        for name, (inputs, targets) in (("training", train), ("validation", val)):
            if len(inputs) == 0 or len(inputs) != len(targets):
                raise ConfigError(
                    f"{name} data must have as many targets as inputs and at least one, "
                    f"got {len(inputs)} and {len(targets)}"
                )
        self.train, self.val, self.batch, self.augment = train, val, batch, augment
        self.max_batches, self.val_batch = max_batches, val_batch

    def on(self, device: torch.device) -> "TensorSource":
        """The same batches from data that is kept on the device, if it has room for them."""
        tensors = (*self.train, *self.val)
        if device.type == "cpu" or not has_room(tensors, device):
            return self
        moved = copy.copy(self)
        moved.train, moved.val = (
            (inputs.to(device), targets.to(device)) for inputs, targets in (self.train, self.val)
        )
        return moved

    def train_order(self, generator: torch.Generator) -> Tensor:
        """The indices of an epoch's examples, in order."""
        return torch.randperm(len(self.train[0]), generator=generator)

    def train_batches(self, key: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(key)
        inputs, targets = self.train
        order = self.train_order(generator).to(inputs.device)
        for rows in order.split(self.batch)[: self.max_batches]:
            x = inputs[rows]
            yield (x if self.augment is None else self.augment(x, generator)), targets[rows]

    def val_batches(self) -> Iterator[Batch]:
        inputs, targets = (part.split(self.val_batch) for part in self.val)
        return zip(inputs, targets, strict=True)

    def example(self) -> Any:
        return self.train[0][: min(2, len(self.train[0]))]

    def size(self) -> DataSize:
        examples = len(self.train[0])
        batches = -(-examples // self.batch)
        if self.max_batches is not None:
            batches = min(batches, self.max_batches)
        return DataSize(batches, min(examples, batches * self.batch), len(self.val[0]))


class LoaderSource:
    """Loaders of the user, which do their own shuffling.

    They yield (input, target), or a dict that is both: the model gets it as keywords, loss and
    score as the target. With `forward(model, input)`, which then calls the model, batches may have
    any type. An epoch is the first `batches_per_epoch` batches, or all.

    Raises ConfigError for loaders that cannot be read every epoch; warns of an endless epoch.
    """

    def __init__(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any],
        example: Any = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        batches_per_epoch: int | None = None,
    ) -> None:
        self.train_loader, self.val_loader = train_loader, val_loader
        self.forward, self.batches_per_epoch = forward, batches_per_epoch
        self._batch_sizes = []
        if example is not None:
            example = self._input(example)
        for name, loader in (("train_loader", train_loader), ("val_loader", val_loader)):
            if isinstance(loader, Iterator):
                raise ConfigError(
                    f"{name} is a generator, which can be read only once; give an iterable that "
                    "can be read every epoch, such as a list or a DataLoader"
                )
            first = next(iter(loader), None)
            if first is None:
                raise ConfigError(f"{name} is empty; it must yield at least one batch")
            self._check(name, first)
            inputs, _ = self._pair(first)
            self._batch_sizes.append(batch_size(inputs))
            if example is None:
                example = inputs
        self._example = example

    def _check(self, name: str, batch: Any) -> None:
        if not isinstance(batch, Mapping) and self.forward is None and not _is_pair(batch):
            raise ConfigError(
                f"{name} must yield pairs (input, target) or dicts, got {type(batch).__name__}; "
                "for other batches give forward=, a function of (model, batch)"
            )
        inputs, target = self._pair(batch)
        single = isinstance(target, Tensor) and target.dim() == 0
        if single or isinstance(target, int | float):
            raise ConfigError(
                f"{name} must yield batches, but its target is a single number; put the data set "
                "into a DataLoader"
            )
        if isinstance(target, Tensor) and len(target) != batch_size(inputs):
            raise ConfigError(
                f"{name} yields {batch_size(inputs)} inputs with {len(target)} targets; "
                "there must be one target for every input"
            )

    def _pair(self, batch: Any) -> Batch:
        if isinstance(batch, Mapping):
            return self._input(dict(batch)), batch
        inputs, target = batch if _is_pair(batch) else (batch, batch)
        return self._input(inputs), target

    def _input(self, value: Any) -> Any:
        return value if self.forward is None else CallInput(self.forward, value)

    def train_batches(self, key: int) -> Iterator[Batch]:
        limited = islice(self.train_loader, self.batches_per_epoch)
        watched = self.batches_per_epoch is None and not has_length(self.train_loader)
        return self._pairs("train_loader", limited, watched)

    def val_batches(self) -> Iterator[Batch]:
        return self._pairs("val_loader", self.val_loader, not has_length(self.val_loader))

    def _pairs(self, name: str, batches: Iterable[Any], watched: bool) -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            if watched and number == LONG_EPOCH:
                warnings.warn(
                    f"{name} has no length and has yielded {number} batches in this epoch; if it "
                    "is endless, give batches_per_epoch=...",
                    EsperWarning,
                    stacklevel=2,
                )
            yield self._pair(batch)

    def example(self) -> Any:
        return self._example

    def size(self) -> DataSize:
        batches, val_batches = _length(self.train_loader), _length(self.val_loader)
        if self.batches_per_epoch is not None:
            batches = min(self.batches_per_epoch, batches or self.batches_per_epoch)
        sizes = zip((batches, val_batches), self._batch_sizes, strict=True)
        return DataSize(batches, *(None if n is None else n * size for n, size in sizes))


def has_length(loader: Any) -> bool:
    """Whether `len` works; a DataLoader has `__len__` even if its data set has no length."""
    return _length(loader) is not None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def batch_factors(rates: np.ndarray, batch: int, batches: int | None) -> np.ndarray:
    """The learning-rate factors [...] of a batch, interpolated between `rates` [..., 2] at the
    start and end of its epoch. It is taken at the middle of the batch, so that none is 0, or of the
    epoch if the number of batches is not known."""
    share = 0.5 if batches is None else min((batch + 0.5) / batches, 1.0)
    return np.asarray(rates[..., 0] + (rates[..., 1] - rates[..., 0]) * share)
