"""What paired comparisons of few pairs cannot show."""

SIGNIFICANT = 0.05


def few_pairs(pairs: int, comparisons: int) -> str | None:
    """One sentence if so few pairs can show no significant difference; None if they can.

    A sign-flip test of n pairs has 2^n patterns, so that its p-value is at least 2 / 2^n. Holm
    multiplies the smallest of the comparisons by their number.
    """

    def smallest(n: int) -> float:
        return min(1.0, comparisons * 2.0 ** (1 - n))

    if comparisons < 1 or (pairs > 1 and smallest(pairs) < SIGNIFICANT):
        return None
    needed = next(n for n in range(2, 100) if smallest(n) < SIGNIFICANT)
    if pairs < 2:
        return f"One pair has no interval and no p-value; significance needs {needed} pairs."
    holm = f" after Holm over {comparisons} comparisons" if comparisons > 1 else ""
    return (
        f"With {pairs} pairs no difference can be significant: the smallest possible p-value is "
        f"{smallest(pairs):.2g}{holm}; {needed} pairs are needed."
    )
