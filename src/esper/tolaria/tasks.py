"""Tasks: data, host, slots, objectives and defaults of what the command can train."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from esper.growth.blueprints.catalogue import BlueprintCatalogue, default_catalogue
from esper.growth.depth import BLOCKS
from esper.growth.devices import input_device, on_device
from esper.growth.hosts import CNNHost, TransformerHost
from esper.growth.sites import evaluating
from esper.leyline import ConfigError
from esper.leyline.depth import Depth
from esper.leyline.growth_settings import RateSchedule
from esper.tolaria.data import images, text
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.batches import VAL_BATCH, TensorSource
from esper.tolaria.engine.objectives import Objective, accuracy, cross_entropy, with_axis
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
    depth     optional: the host grows in depth, and not at its slots
    host_of_widths, shape  optional: hosts by the width of every layer, and the widths of `build`
    widths    optional: widths of the first layer of hosts of the same proportions, among which an
              evaluation finds the best static network
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
    depth: Depth | None = None
    host_of_widths: Callable[[tuple[int, ...]], nn.Module] | None = None
    shape: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.host_of_widths is None) != (not self.shape) or (self.widths and not self.shape):
            raise ConfigError(
                f"give task {self.name!r} both host_of_widths and shape, or neither and no widths"
            )

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
        catalogue has all installed blueprints, or blocks for growth in depth."""
        default = default_catalogue() if self.depth is None else BLOCKS
        return HostRecipe(
            build=self.build,
            slots=self.depth or self.slots,
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
            catalogue=catalogue or default,
            max_grad_norm=self.max_grad_norm,
            precision=self.precision,
        )


def block_slots(count: int) -> tuple[str, ...]:
    """Slots after every block of a host."""
    return tuple(f"blocks.{i}" for i in range(count))


ENTRY_POINT_GROUP = "esper.tasks"
PYDOCS_BLOCK_SIZE = 64
# Said, because a context may have as many positions as there are classes of bytes.
OF_BYTES: dict[str, Any] = {"loss": with_axis(cross_entropy, -1), "score": with_axis(accuracy, -1)}


def cnn_of_widths(widths: tuple[int, ...], **options: Any) -> nn.Module:
    return CNNHost(widths=widths, **options)


def _cnn_hosts(
    width: int, widths: tuple[int, ...], blocks: int = 3, **options: Any
) -> dict[str, Any]:
    """The fields of a task that describe its hosts. Its own has `width` channels at first, and
    every block is twice as wide as the one before."""
    of_widths = partial(cnn_of_widths, **options)
    shape = tuple(width * 2**block for block in range(blocks))
    return {
        "build": partial(of_widths, shape),
        "slots": block_slots(blocks),
        "host_of_widths": of_widths,
        "shape": shape,
        "widths": widths,
    }


DIGITS = Task(
    name="digits",
    description="8x8 handwritten digits, a convolutional host of 496 parameters",
    data_set="digits",
    load=images.load_digits,
    steps=30,
    batch=64,
    learning_rate=1e-2,
    schedule=RateSchedule(decay=0.25),
    **_cnn_hosts(2, (1, 2, 3, 4, 5, 6, 7, 8), in_channels=1),
)
PYDOCS = Task(
    name="pydocs",
    description="next byte of Python's documentation, a small causal transformer",
    data_set="pydocs",
    load=partial(text.load_pydocs, block_size=PYDOCS_BLOCK_SIZE),
    **OF_BYTES,
    build=partial(
        TransformerHost,
        vocab=256,
        n_embd=16,
        n_head=4,
        n_layer=3,
        block_size=PYDOCS_BLOCK_SIZE,
        dropout=0.0,
    ),
    slots=block_slots(3),
    steps=30,
    batch=64,
    batches_per_epoch=24,
    learning_rate=1e-2,
    max_grad_norm=1.0,
)
# No policy that comes with Esper was trained on mnist or fashion_mnist: they are for evaluation.
MNIST = Task(
    name="mnist",
    description="28x28 handwritten digits, a convolutional host of 1,702 parameters",
    data_set="mnist",
    load=images.load_mnist,
    steps=12,
    batch=128,
    learning_rate=1e-2,
    **_cnn_hosts(4, (2, 3, 4, 5, 6, 8, 10, 12), in_channels=1),
)
FASHION_MNIST = replace(
    MNIST,
    name="fashion_mnist",
    description="28x28 images of clothes, a convolutional host of 1,702 parameters",
    data_set="fashion_mnist",
    load=partial(images.load_mnist, name="fashion_mnist"),
)
CIFAR10 = Task(
    name="cifar10",
    description="32x32 colour images, a weak convolutional host of 6,418 parameters",
    data_set="cifar10",
    load=images.load_cifar10,
    steps=25,
    batch=128,
    learning_rate=1e-2,
    schedule=RateSchedule(decay=0.25),
    augment=images.augment_cifar10,
    **_cnn_hosts(8, (4, 6, 8, 10, 12, 16)),
)
CIFAR10_DEEP = replace(
    CIFAR10,
    name="cifar10_deep",
    description="the same images, five blocks, 99,922 parameters",
    **_cnn_hosts(8, CIFAR10.widths, blocks=5),
)
CIFAR10_BLIND = replace(
    CIFAR10,
    name="cifar10_blind",
    description="the same images, 1x1 kernels only: the host needs seeds with larger kernels",
    **_cnn_hosts(32, (16, 24, 32, 40, 48, 64), kernel_size=1),
)
# Without augmentation, so that the host memorises its images. On images of this size the usual
# augmentation costs the host of cifar10_10k three percentage points.
CIFAR10_2K = replace(
    CIFAR10,
    name="cifar10_2k",
    description="2,000 images of 16x16, the weak host: it memorises them",
    load=partial(images.load_small_cifar10, train=2_000, val=1_000),
    steps=70,
    batch=32,
    augment=None,
)
CIFAR10_2K_WIDE = replace(
    CIFAR10_2K,
    name="cifar10_2k_wide",
    description="the same 2,000 images, a host of 53,794 parameters",
    steps=30,
    learning_rate=3e-3,
    **_cnn_hosts(24, (12, 16, 24, 32)),
)
CIFAR10_10K = replace(
    CIFAR10_2K,
    name="cifar10_10k",
    description="10,000 images of 16x16, the weak host: it never memorises them all",
    load=partial(images.load_small_cifar10, train=10_000, val=2_000),
    steps=20,
    batch=64,
)
LINUXDOCS = Task(
    name="linuxdocs",
    description="next byte of the documentation of Linux, a transformer of four layers",
    data_set="linuxdocs",
    load=text.load_documents,
    **OF_BYTES,
    build=partial(
        TransformerHost,
        vocab=256,
        n_embd=128,
        n_head=4,
        n_layer=4,
        block_size=text.LINUXDOCS_BLOCK_SIZE,
        dropout=0.0,
    ),
    slots=block_slots(4),
    steps=30,
    batch=32,
    batches_per_epoch=32,
    learning_rate=1e-3,
    max_grad_norm=1.0,
)
BUILT_IN = (
    DIGITS,
    PYDOCS,
    MNIST,
    FASHION_MNIST,
    CIFAR10,
    CIFAR10_DEEP,
    CIFAR10_BLIND,
    CIFAR10_2K,
    CIFAR10_2K_WIDE,
    CIFAR10_10K,
    LINUXDOCS,
)


@cache
def all_tasks() -> dict[str, Task]:
    """The built-in tasks, then those of installed packages, by name."""
    tasks = {task.name: task for task in BUILT_IN}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        tasks[point.name] = point.load()
    return tasks


def find_task(name: str) -> Task:
    """Raises ConfigError, with the known names, if there is no such task."""
    tasks = all_tasks()
    if name not in tasks:
        raise ConfigError(f"no task {name!r}; there are {', '.join(tasks)}")
    return tasks[name]
