"""`esper grow --then retrain`: train what was found anew, beside what else the compute buys."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from esper.cli.grow_command import GrowSettings
    from esper.proof import Plan
    from esper.tolaria import DataSplits, Task, Trained

ANEW, UNIFORM, RANDOM = "trained anew", "best uniform", "best random"


def retrain(
    console: "Console",
    settings: "GrowSettings",
    task: "Task",
    data: "DataSplits",
    arms: "Mapping[str, Trained]",
    beside: "Callable[[str, Plan], Trained]",
) -> dict[str, int]:
    """Train the arms after the grown one, and give what each took in all, in multiply-adds: of the
    found shape the search too, of the others the networks that they were chosen from. `beside`
    trains an arm with a record of its own, and remembers it. Ctrl-C ends it with the arms that
    are finished."""
    from esper.observatory import say
    from esper.proof import Found
    from esper.tolaria import Budget

    grown = arms["grown"]
    budget = Budget(params=settings.max_params, macs=settings.max_macs)
    found = Found.of(grown, task, data, budget)
    say(console, f"found: {found.in_words()}")
    anew = beside(ANEW, found.anew(settings.steps or task.steps))
    spent = grown.outcome.train_macs + anew.outcome.train_macs
    bills = {ANEW: spent}
    if not settings.compare or anew.outcome.ended != "finished":
        return bills
    try:
        for label, plans in ((UNIFORM, found.uniform(spent)), (RANDOM, found.random(spent))):
            if plans:
                best, bill = _choose(console, label, plans, data, settings.key)
                beside(label, best)
                bills[label] = bill
            else:
                say(console, f"{label}: task {task.name!r} has no hosts to choose from")
    except KeyboardInterrupt:
        pass
    return bills


def _choose(
    console: "Console", label: str, plans: "Sequence[Plan]", data: "DataSplits", key: int
) -> "tuple[Plan, int]":
    """The plan that is best on validation, and what all of them cost."""
    from esper.proof import train

    tried: list[Trained] = []
    with console.status(f"looking for the {label} of {len(plans)}"):
        for plan in plans:
            tried += train(plan, data, [key])
    # A network that was never measured is worth nothing.
    scores = [-math.inf if t.outcome.val_score is None else t.outcome.val_score for t in tried]
    best = max(range(len(plans)), key=scores.__getitem__)
    return plans[best], sum(t.outcome.train_macs for t in tried)
