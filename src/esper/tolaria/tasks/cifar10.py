"""cifar10 with three hosts: a weak one, a deep one, and one that cannot see beyond a pixel."""

from dataclasses import replace
from functools import partial

from esper.growth import CNNHost
from esper.tolaria.data import cifar10
from esper.tolaria.tasks.base import Task, block_slots

CIFAR10 = Task(
    name="cifar10",
    description="32x32 colour images, a weak convolutional host of 6,418 parameters",
    data_set="cifar10",
    load=cifar10.load,
    build=partial(CNNHost, base_channels=8, n_blocks=3),
    slots=block_slots(3),
    steps=25,
    batch=128,
    learning_rate=1e-2,
    augment=cifar10.augment,
)
CIFAR10_DEEP = replace(
    CIFAR10,
    name="cifar10_deep",
    description="the same images, five blocks, 99,922 parameters",
    build=partial(CNNHost, base_channels=8, n_blocks=5),
    slots=block_slots(5),
)
CIFAR10_BLIND = replace(
    CIFAR10,
    name="cifar10_blind",
    description="the same images, 1x1 kernels only: the host needs seeds that look around",
    build=partial(CNNHost, base_channels=32, n_blocks=3, kernel_size=1),
)
