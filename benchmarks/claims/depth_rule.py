"""When to deepen a network, from its loss curve and the cost of the next depth alone."""

from collections.abc import Sequence

import numpy as np

SPAN = 4.0  # the compute of the run must have grown so many times at the present depth
WINDOW = 2.0  # the slope is taken where the compute grew so many times last
POINTS = 8  # losses that must be known there
FALL = 0.12  # a smaller fall of the loss, as a share of it, is worth giving up


def grow_now(losses: Sequence[float], computes: Sequence[float], cost_ratio: float) -> bool:
    """Whether the time to deepen the network has come.

    `losses[i]` is the mean loss of the i-th epoch at the present depth, on data that the network
    had not seen, and `computes[i]` what the *whole* run had cost at its end. `cost_ratio` is what a
    step costs at the next depth, divided by what it costs now.

    For the same compute a deeper network takes fewer steps: it gives up the fall of the loss over
    log2(cost_ratio) doublings. It may come if that is less than FALL of the loss, and if the
    compute has grown SPAN times since the network grew last: depth then follows the square root of
    the compute. The slope is a least-squares line of the last losses over log2(compute).
    """
    loss, spent = np.asarray(losses, float), np.asarray(computes, float)
    if len(loss) != len(spent):
        raise ValueError(f"{len(loss)} losses but {len(spent)} computes")
    if not len(loss) or spent[-1] < SPAN * spent[0]:
        return False
    recent = spent >= spent[-1] / WINDOW
    if recent.sum() < POINTS:
        return False
    slope, _ = np.polyfit(np.log2(spent[recent]), loss[recent], 1)
    return bool(-slope * np.log2(cost_ratio) < FALL * loss[recent].mean())
