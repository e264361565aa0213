"""digits: the task to start with. Small enough for a minute, with room to grow. And the same digits
when what a host has learnt is no longer all there is."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from esper.growth import CNNHost
from esper.tolaria.data import digits
from esper.tolaria.data.splits import DataSplits, first_classes, turned
from esper.tolaria.schedule import RateSchedule
from esper.tolaria.tasks.base import Task, block_slots

CLASSES_BEFORE = 5
QUARTERS = 1  # by which digits are turned: a right angle keeps every pixel


def host(width: int) -> nn.Module:
    return host_of_widths((width, 2 * width, 4 * width))


def host_of_widths(widths: tuple[int, ...]) -> nn.Module:
    return CNNHost(num_classes=10, in_channels=1, widths=widths)


def load_first_classes(root: Path) -> DataSplits:
    return first_classes(digits.load(root), CLASSES_BEFORE)


def load_turned(root: Path) -> DataSplits:
    return turned(digits.load(root), QUARTERS)


TASK = Task(
    name="digits",
    description="8x8 handwritten digits, a convolutional host of 496 parameters",
    data_set="digits",
    load=digits.load,
    build=partial(host, 2),
    slots=block_slots(3),
    steps=30,
    batch=64,
    learning_rate=1e-2,
    schedule=RateSchedule(decay=0.25),
    host_of_width=host,
    widths=(1, 2, 3, 4, 5, 6, 7, 8),
    host_of_widths=host_of_widths,
    shape=(2, 4, 8),
)
SHIFT_CLASSES = replace(
    TASK,
    name="digits_shift_classes",
    description="the same digits; before the shift there were only 0 to 4",
    load_before=load_first_classes,
)
SHIFT_TURNED = replace(
    TASK,
    name="digits_shift_turned",
    description="the same digits turned by a right angle; before the shift they stood upright",
    load=load_turned,
    load_before=digits.load,
)
