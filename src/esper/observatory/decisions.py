"""The decisions of a learned policy as a view lists them: what it did, how sure, what else."""

from collections.abc import Mapping
from typing import Any

from esper.observatory.reading import number, whole

HEADS = ("op", "slot", "blueprint", "blend")


def choices(event: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By head, the probability of each choice that was open, the likeliest first."""
    columns = [event.get(name) for name in ("heads", "choices", "probabilities")]
    rows = zip(*(each if isinstance(each, list | tuple) else () for each in columns), strict=False)
    found: dict[str, dict[str, float]] = {}
    for head, choice, probability in rows:
        open_to_it = number({"": probability}, "")
        if open_to_it is not None:
            found.setdefault(str(head), {})[str(choice)] = open_to_it
    return found


def decision_line(event: Mapping[str, Any]) -> dict[str, Any]:
    """Of a `Decided` event: the epoch that came next, what was done with the probability of each of
    its parts, the value, and the op that came second."""
    open_to_it = choices(event)
    taken = event.get("taken")
    names = taken if isinstance(taken, list | tuple) and len(taken) == len(HEADS) else [None] * 4
    done = {head: str(name) for head, name in zip(HEADS, names, strict=True) if name is not None}
    ops = [(op, p) for op, p in open_to_it.get("op", {}).items() if op != done.get("op")]
    return {
        "step": whole(event, "step"),
        "value": number(event, "value"),
        "did": [[name, open_to_it.get(head, {}).get(name)] for head, name in done.items()],
        "instead": _instead(ops[0], event, open_to_it) if ops else [],
    }


def _instead(
    op: tuple[str, float], event: Mapping[str, Any], open_to_it: Mapping[str, dict[str, float]]
) -> list[list[Any]]:
    parts: list[list[Any]] = [list(op)]
    if event.get("supposed") is True and op[0] == "GERMINATE":
        for head in ("slot", "blueprint"):
            parts += [list(each) for each in list(open_to_it.get(head, {}).items())[:1]]
    return parts


def in_words(parts: list[list[Any]]) -> str:
    """'GERMINATE 0.37, blocks.1 0.80'."""
    return ", ".join(name if p is None else f"{name} {p:.2f}" for name, p in parts)
