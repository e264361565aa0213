"""`esper grow --then retrain`: train what was found anew, beside what else the compute buys."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esper.cli.arms import Arms
    from esper.tolaria import Task

ANEW, UNIFORM, RANDOM = "trained anew", "best uniform", "best random"


def retrain(arms: "Arms", task: "Task") -> dict[str, int]:
    """Train the arms after the grown one, and give what each took in all, in multiply-adds: of the
    found shape the search too, of the others the networks that they were chosen from.
    Ctrl-C ends it with the arms that are finished."""
    from esper.observatory import say
    from esper.proof import Found
    from esper.tolaria import Budget

    console, settings, grown = arms.console, arms.settings, arms.trained["grown"]
    budget = Budget(params=settings.max_params, macs=settings.max_macs)
    found = Found.of(grown, task, arms.data, budget)
    say(console, f"found: {found.in_words()}")
    anew = arms.beside(ANEW, found.anew(arms.steps))
    spent = grown.outcome.train_macs + anew.outcome.train_macs
    bills = {ANEW: spent}
    if not settings.compare or anew.outcome.ended != "finished":
        return bills
    try:
        for label, plans in ((UNIFORM, found.uniform(spent)), (RANDOM, found.random(spent))):
            if plans:
                best, bills[label] = arms.best_of(label, plans)
                arms.beside(label, best)
            else:
                say(console, f"{label}: task {task.name!r} has no hosts to choose from")
    except KeyboardInterrupt:
        pass
    return bills
