"""The built-in families: small convolutional hosts for `digits`."""

from torch import nn

from esper.growth.hosts import CNNHost
from esper.leyline import ConfigError
from esper.tolaria.families.base import Family, Shape
from esper.tolaria.tasks import DIGITS

# fmt: off
# The shapes on which claim D in docs/claims.md was tested.
CLAIM_D: tuple[Shape, ...] = (
    (1, 4, 14), (1, 7, 15), (1, 9, 4), (1, 11, 10), (1, 11, 11), (1, 11, 13), (2, 1, 11), (2, 2, 8),
    (2, 2, 10), (2, 6, 16), (2, 7, 2), (2, 8, 7), (3, 4, 7), (3, 6, 10), (3, 8, 6), (3, 10, 10),
    (3, 12, 8), (4, 1, 10), (4, 2, 12), (4, 3, 10), (4, 5, 12), (5, 2, 8), (5, 4, 10), (5, 7, 10),
    (5, 7, 12), (5, 8, 9), (5, 9, 4), (5, 11, 7), (6, 5, 3), (6, 5, 7), (6, 6, 12), (6, 8, 13),
)
# fmt: on


def host(widths: Shape, kernel: int) -> nn.Module:
    # A third pooling leaves one pixel, which a norm in a fourth block could not normalise.
    pools = len(widths) if len(widths) <= 3 else 2
    return CNNHost(in_channels=1, widths=widths, kernel_size=kernel, pool_layers=pools)


MIXED = Family(
    name="digits:mixed",
    description="everything varies: depth, widths, kernel, rate, data, fresh or trained, budget",
    task=DIGITS,
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
    description="trained hosts of three blocks, a budget of 0.3 of their cost, three blueprints",
    task=DIGITS,
    build=host,
    # A last block of width 1 would have a single value at the end, which no norm accepts.
    widths=((1, 6), (1, 12), (2, 16)),
    params=(200, 2_000),
    blueprints=("conv_light", "branch", "widen_double"),
    held_out=CLAIM_D,
)
BOTTLENECK = Family(
    name="digits:bottleneck",
    description="trained hosts in which one random block is narrow; seeds can widen it",
    task=DIGITS,
    build=host,
    widths=((4, 6), (5, 12), (6, 16)),
    narrow=((1, 1), (1, 2), (2, 3)),
    # No branch: from any slot before the narrow block it would bypass it, so that more than one
    # slot would be right.
    blueprints=("conv_light", "widen_half", "widen_double"),
    held_out=CLAIM_D,
    sizes={"train": 96, "validation": 24, "test": 24},
)
BUILT_IN = {family.name: family for family in (MIXED, TRAINED, BOTTLENECK)}


def find_family(name: str) -> Family:
    """Raises ConfigError, with the known names, if there is no such family."""
    if name not in BUILT_IN:
        raise ConfigError(f"no family {name!r}; there are {', '.join(BUILT_IN)}")
    return BUILT_IN[name]
