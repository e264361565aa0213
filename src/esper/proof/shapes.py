"""Random shapes of a family of hosts: a control for knowing where width is needed."""

import math
from collections.abc import Callable

import torch
from torch import nn

from esper.growth.blueprints.catalogue import count_params
from esper.leyline import draw_key

Shape = tuple[int, ...]

SPREAD = math.log(3.0)  # log of the largest factor by which a layer differs from its share
TOLERANCE = 0.1  # of the number of parameters, as a share
MOST_DRAWS = 1000


def random_shapes(
    host_of_widths: Callable[[Shape], nn.Module], shape: Shape, params: float, count: int
) -> list[Shape]:
    """`count` different shapes, or fewer if there are no more, of about `params` parameters each.

    Each layer's share of the width is that of `shape` times a random factor of its own. The same
    arguments return the same shapes.
    """

    def size(widths: Shape) -> int:
        with torch.device("meta"):
            return count_params(host_of_widths(widths))

    def scaled(shares: list[float]) -> Shape:
        """Widths in these proportions with the parameters nearest to `params`, by bisection."""
        low, high = 1e-3, 1e3
        for _ in range(30):
            middle = math.sqrt(low * high)
            if size(_widths(shares, middle)) > params:
                high = middle
            else:
                low = middle
        ends = [_widths(shares, low), _widths(shares, high)]
        return min(ends, key=lambda widths: abs(size(widths) - params))

    found: list[Shape] = []
    for number in range(MOST_DRAWS):
        if len(found) == count:
            break
        drawn = scaled([width * _factor(number, layer) for layer, width in enumerate(shape)])
        # The task's own shape, only wider or narrower, is not random.
        even = len({width / own for width, own in zip(drawn, shape, strict=True)}) == 1
        if abs(size(drawn) / params - 1.0) <= TOLERANCE and drawn not in found and not even:
            found.append(drawn)
    return found


def _factor(number: int, layer: int) -> float:
    share = draw_key(number, "shape", layer) % 10_000 / 10_000
    return math.exp(SPREAD * (2.0 * share - 1.0))


def _widths(shares: list[float], scale: float) -> Shape:
    return tuple(max(1, round(scale * share)) for share in shares)
