"""`esper explain`: one decision of a run."""

from dataclasses import dataclass, field

import typer

from esper.cli.options import option
from esper.cli.printing import AS_JSON, QUIET, consoles, print_json
from esper.leyline.constants import MOST_COUNT, MOST_KEY


@dataclass(frozen=True)
class ExplainSettings:
    run: str = field(metadata={"option": typer.Argument(help="A run, or an evaluation.")})
    step: int = option(
        ..., "The epoch that the decision came before; the first is 1.", min=0, max=MOST_COUNT
    )
    env: int = option(0, "The environment.", min=0, max=MOST_COUNT)
    round: int | None = option(
        None, "Of a training run: the round. Default: the newest complete one.", min=0
    )
    arm: str | None = option(None, "Of an evaluation: the learned policy, as it names it.")
    key: int | None = option(None, "Of an evaluation: the key.", min=0, max=MOST_KEY)
    quiet: bool = option(False, QUIET)
    json: bool = option(False, AS_JSON)


def explain(settings: ExplainSettings) -> None:
    """Say what a controller saw, thought and did at one step of a run, and what came of it.

    A learned policy gives the probabilities of all its choices and what its mask forbade. A growth
    run has recorded them; an episode of a training run is played again for it.

    Examples:

      esper explain runs/first --step 7

      esper explain runs/ppo --round 12 --env 3 --step 7 --json

      esper explain runs/evaluate-digits --arm pretrained --key 3 --step 7
    """
    from esper.api import explain
    from esper.observatory.explain import explanation_in_words
    from esper.observatory.terminal import say

    told = explain(
        settings.run,
        step=settings.step,
        env=settings.env,
        round=settings.round,
        arm=settings.arm,
        key=settings.key,
    )
    _, result = consoles(settings.quiet, settings.json)
    say(result, explanation_in_words(told), whole=True)
    if settings.json:
        print_json(told)
