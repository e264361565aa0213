"""cifar10 with three hosts: a weak one, a deep one, and one that cannot see beyond a pixel. And the
same images made smaller and fewer, to train many hosts."""

from dataclasses import replace
from functools import partial

from torch import nn

from esper.growth.hosts.cnn import CNNHost
from esper.leyline.growth_settings import RateSchedule
from esper.tolaria.data import cifar10
from esper.tolaria.tasks.base import Task, block_slots


def host(width: int, blocks: int = 3, kernel_size: int = 3) -> nn.Module:
    return host_of_widths(tuple(width * 2**i for i in range(blocks)), kernel_size)


def host_of_widths(widths: tuple[int, ...], kernel_size: int = 3) -> nn.Module:
    return CNNHost(widths=widths, kernel_size=kernel_size)


CIFAR10 = Task(
    name="cifar10",
    description="32x32 colour images, a weak convolutional host of 6,418 parameters",
    data_set="cifar10",
    load=cifar10.load,
    build=partial(host, 8),
    slots=block_slots(3),
    steps=25,
    batch=128,
    learning_rate=1e-2,
    schedule=RateSchedule(decay=0.25),
    augment=cifar10.augment,
    host_of_width=host,
    widths=(4, 6, 8, 10, 12, 16),
    host_of_widths=host_of_widths,
    shape=(8, 16, 32),
)
CIFAR10_DEEP = replace(
    CIFAR10,
    name="cifar10_deep",
    description="the same images, five blocks, 99,922 parameters",
    build=partial(host, 8, blocks=5),
    slots=block_slots(5),
    host_of_width=partial(host, blocks=5),
    shape=(8, 16, 32, 64, 128),
)
CIFAR10_BLIND = replace(
    CIFAR10,
    name="cifar10_blind",
    description="the same images, 1x1 kernels only: the host needs seeds that look around",
    build=partial(host, 32, kernel_size=1),
    host_of_width=partial(host, kernel_size=1),
    widths=(16, 24, 32, 40, 48, 64),
    host_of_widths=partial(host_of_widths, kernel_size=1),
    shape=(32, 64, 128),
)
# Without augmentation the host knows its images by heart in the end; and on images of this size the
# usual augmentation costs the host of the 10,000 three points.
CIFAR10_2K = replace(
    CIFAR10,
    name="cifar10_2k",
    description="2,000 images of 16x16, the weak host: it memorises them",
    load=partial(cifar10.load_small, train=2_000, val=1_000),
    steps=70,
    batch=32,
    augment=None,
)
CIFAR10_2K_WIDE = replace(
    CIFAR10_2K,
    name="cifar10_2k_wide",
    description="the same 2,000 images, a host of 53,794 parameters",
    build=partial(host, 24),
    steps=30,
    learning_rate=3e-3,
    widths=(12, 16, 24, 32),
    shape=(24, 48, 96),
)
CIFAR10_10K = replace(
    CIFAR10_2K,
    name="cifar10_10k",
    description="10,000 images of 16x16, the weak host: it never knows them all",
    load=partial(cifar10.load_small, train=10_000, val=2_000),
    steps=20,
    batch=64,
)
