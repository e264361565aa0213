"""Families of `digits`: small convolutional hosts that lack width in one place or another."""

from torch import nn

from esper.growth.hosts.cnn import CNNHost
from esper.tolaria.families.base import Family, Shape
from esper.tolaria.tasks.digits import TASK

# fmt: off
# The shapes of claim D in docs/claims.md: known from many episodes.
CLAIM_D: tuple[Shape, ...] = (
    (1, 4, 14), (1, 7, 15), (1, 9, 4), (1, 11, 10), (1, 11, 11), (1, 11, 13), (2, 1, 11), (2, 2, 8),
    (2, 2, 10), (2, 6, 16), (2, 7, 2), (2, 8, 7), (3, 4, 7), (3, 6, 10), (3, 8, 6), (3, 10, 10),
    (3, 12, 8), (4, 1, 10), (4, 2, 12), (4, 3, 10), (4, 5, 12), (5, 2, 8), (5, 4, 10), (5, 7, 10),
    (5, 7, 12), (5, 8, 9), (5, 9, 4), (5, 11, 7), (6, 5, 3), (6, 5, 7), (6, 6, 12), (6, 8, 13),
)
# fmt: on


def host(widths: Shape, kernel: int) -> nn.Module:
    """The first blocks halve the image, as long as pixels are left for a norm to compare."""
    pools = len(widths) if len(widths) <= 3 else 2
    return CNNHost(
        num_classes=10, in_channels=1, widths=widths, kernel_size=kernel, pool_layers=pools
    )


MIXED = Family(
    name="digits:mixed",
    description="everything varies: depth, widths, kernel, rate, data, fresh or trained, budget",
    task=TASK,
    build=host,
    widths=((1, 6), (1, 12), (2, 16), (2, 16)),
    blocks=(2, 4),
    params=(150, 2_500),
    kernels=(3, 5),
    rates=(0.5, 1.0, 2.0),
    shares=(0.5, 1.0),
    starts=("fresh", "trained", "trained"),
    extras=(0.2, 0.3, 0.5),
    held_out=CLAIM_D,
)
TRAINED = Family(
    name="digits:trained",
    description="trained hosts of three blocks, 0.3 of their cost for one of three kinds of seeds",
    task=TASK,
    build=host,
    # A last block of width 1 has a single value at the end, which no norm takes.
    widths=((1, 6), (1, 12), (2, 16)),
    params=(200, 2_000),
    blueprints=("conv_light", "branch", "widen_double"),
    held_out=CLAIM_D,
)
BOTTLENECK = Family(
    name="digits:bottleneck",
    description="trained hosts with one narrow block at a random place, which seeds can widen",
    task=TASK,
    build=host,
    widths=((4, 6), (5, 12), (6, 16)),
    narrow=((1, 1), (1, 2), (2, 3)),
    # No branch: from any slot before the narrow block it would go around it, and there would be
    # more than one right place.
    blueprints=("conv_light", "widen_half", "widen_double"),
    held_out=CLAIM_D,
    sizes={"train": 96, "validation": 24, "test": 24},
)
FAMILIES = (MIXED, TRAINED, BOTTLENECK)
