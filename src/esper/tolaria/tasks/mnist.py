"""mnist and fashion_mnist: kept for evaluation; no policy that comes with Esper has seen them."""

from dataclasses import replace
from functools import partial

from torch import nn

from esper.growth.hosts.cnn import CNNHost
from esper.tolaria.data import idx
from esper.tolaria.tasks.base import Task, block_slots


def host(width: int) -> nn.Module:
    return CNNHost(num_classes=10, n_blocks=3, base_channels=width, in_channels=1)


MNIST = Task(
    name="mnist",
    description="28x28 handwritten digits, a convolutional host of 1,702 parameters",
    data_set="mnist",
    load=idx.load_mnist,
    build=partial(host, 4),
    slots=block_slots(3),
    steps=12,
    batch=128,
    learning_rate=1e-2,
    host_of_width=host,
    widths=(2, 3, 4, 5, 6, 8, 10, 12),
)
FASHION_MNIST = replace(
    MNIST,
    name="fashion_mnist",
    description="28x28 images of clothes, a convolutional host of 1,702 parameters",
    data_set="fashion_mnist",
    load=idx.load_fashion_mnist,
)
