"""mnist and fashion_mnist: kept for evaluation; no policy that comes with Esper has seen them."""

from dataclasses import replace
from functools import partial

from esper.growth import CNNHost
from esper.tolaria.data import idx
from esper.tolaria.tasks.base import Task, block_slots

MNIST = Task(
    name="mnist",
    description="28x28 handwritten digits, a convolutional host of 1,702 parameters",
    data_set="mnist",
    load=idx.load_mnist,
    build=partial(CNNHost, num_classes=10, n_blocks=3, base_channels=4, in_channels=1),
    slots=block_slots(3),
    outputs=10,
    steps=12,
    batch=128,
    learning_rate=1e-2,
)
FASHION_MNIST = replace(
    MNIST,
    name="fashion_mnist",
    description="28x28 images of clothes, a convolutional host of 1,702 parameters",
    data_set="fashion_mnist",
    load=idx.load_fashion_mnist,
)
