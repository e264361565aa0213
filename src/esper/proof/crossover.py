"""Up to which extra budget is growing ahead?"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from esper.proof.choices import labelled
from esper.proof.scenarios import BEST_SCRATCH, CONTINUE_COOLED

RIVALS = (CONTINUE_COOLED, BEST_SCRATCH)


def crossover(
    arms: Sequence[Mapping[str, Any]], reference: str | None, extras: Sequence[float]
) -> str | None:
    """The sentence, from the means of the arms; None if nothing can be said.

    At each extra budget the reference is compared with the better of its rivals; in between the
    mean difference is interpolated linearly.
    """
    scores = {arm["arm"]: arm["test_score"] for arm in arms}
    differences = []
    for extra in extras:
        rivals = [scores.get(labelled(name, extra)) for name in RIVALS]
        known = [score for score in rivals if score is not None]
        if reference is None or not known:
            return None
        differences.append(scores[labelled(reference, extra)] - max(known))
    if not differences:
        return None
    points = list(zip(extras, differences, strict=True))
    told = ", ".join(f"{difference:+.2f} at {extra:g}" for extra, difference in points)
    rival = " and ".join(name for name in RIVALS if labelled(name, extras[0]) in scores)
    against = f"against the better of {rival}" if " and " in rival else f"against {rival}"
    return f"{reference} {_where(points)} ({against}: {told})."


def ahead(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Ranges of x in which the line through the points (x, y), x ascending, is above 0."""
    ranges: list[tuple[float, float]] = []
    for (x0, y0), (x1, y1) in pairwise(points):
        if max(y0, y1) <= 0.0:
            continue
        crossing = x0 if y0 == y1 else x0 + (x1 - x0) * y0 / (y0 - y1)
        low, high = x0 if y0 > 0.0 else crossing, x1 if y1 > 0.0 else crossing
        if ranges and ranges[-1][1] == low:
            ranges[-1] = (ranges[-1][0], high)
        else:
            ranges.append((low, high))
    return ranges


def _where(points: Sequence[tuple[float, float]]) -> str:
    first, last = points[0][0], points[-1][0]
    if all(y > 0.0 for _, y in points):
        tried = "the extra budget" if len(points) == 1 else "every extra budget that was tried,"
        return f"is ahead at {tried} {'of' if len(points) == 1 else 'up to'} {last:g}"
    ranges = ahead(points)
    if not ranges:
        return "is ahead at no extra budget that was tried"
    words = [
        f"up to {high:.2g}" if low == first else f"from {low:.2g} to {high:.2g}"
        for low, high in ranges
    ]
    return f"is ahead with an extra budget {' and '.join(words)}, by linear interpolation"
