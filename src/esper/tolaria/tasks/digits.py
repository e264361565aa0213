"""digits: the task to start with. Small enough for a minute, with room to grow."""

from functools import partial

from torch import nn

from esper.growth.hosts.cnn import CNNHost
from esper.leyline.growth_settings import RateSchedule
from esper.tolaria.data import digits
from esper.tolaria.tasks.base import Task, block_slots


def host(width: int) -> nn.Module:
    return host_of_widths((width, 2 * width, 4 * width))


def host_of_widths(widths: tuple[int, ...]) -> nn.Module:
    return CNNHost(num_classes=10, in_channels=1, widths=widths)


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
