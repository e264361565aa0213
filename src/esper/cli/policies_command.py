"""`esper policies`: those that come with the package, and how to export one."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esper.cli.options import option
from esper.cli.printing import AS_JSON, QUIET, AsJson, Quiet, consoles, print_json

if TYPE_CHECKING:
    from esper.leyline.policy_card import PolicyCard


def policies(context: typer.Context, quiet: Quiet = False, json: AsJson = False) -> None:
    """List the policies that come with Esper; `show` tells all about one, `export` makes one."""
    if context.invoked_subcommand is not None:
        return
    from esper.cli.show_commands import add_row, plain_table
    from esper.leyline.policy_card import HOW_TO_TRAIN, shipped_policies
    from esper.observatory.terminal import say

    there = shipped_policies()
    if json:
        print_json([_row(folder, card) for folder, card in there])
        return
    console, result = consoles(quiet, json)
    if not there:
        say(result, f"No policy comes with this version of Esper; {HOW_TO_TRAIN}.")
        return
    table = plain_table("policy", "parameters", "kB", "trained on", "what it is worth")
    for folder, card in there:
        row = _row(folder, card)
        size = f"{row['bytes'] / 1000:,.0f}"
        add_row(table, card.name, f"{card.parameters:,}", size, card.trained_on, card.worth)
    result.print(table)
    say(console, "\nUse the first with --controller pretrained, any with pretrained:NAME.")


def _row(folder: Path, card: "PolicyCard") -> dict[str, Any]:
    from esper.leyline.policy_card import WEIGHTS

    told = asdict(card)
    del told["settings"]
    return {**told, "bytes": (folder / WEIGHTS).stat().st_size}


def show_policy(
    name: Annotated[str, typer.Argument(help="A policy; see `esper policies`. Or a folder.")],
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Print the card of a policy: what it was trained on, how it was evaluated, where it fails."""
    from esper.leyline.policy_card import find_policy, read_card
    from esper.observatory.terminal import say

    folder = Path(name)
    card = read_card(folder) if folder.is_dir() else find_policy(name)[1]
    if json:
        print_json(asdict(card))
        return
    settings = "\n".join(f"  {key} = {value}" for key, value in card.settings.items())
    parts = [
        f"{card.name}: {card.worth}",
        f"Trained on\n  {card.trained_on}",
        f"Evaluated\n  {card.evaluated}",
        f"Where it fails\n  {card.fails}",
        f"Parameters\n  {card.parameters:,}",
        f"Settings\n{settings}",
    ]
    _, result = consoles(quiet, json)
    say(result, "\n\n".join(parts))


@dataclass(frozen=True)
class ExportSettings:
    run: str = field(metadata={"option": typer.Argument(help="The run that trained the policy.")})
    name: str = option(..., "What it is to be called.")
    out: str = option("policies", "The folder that gets it, as a folder of that name.")
    quiet: bool = option(False, QUIET)
    json: bool = option(False, AS_JSON)


def export(settings: ExportSettings) -> None:
    """Write the policy of a training run for others to use: weights and a card, nothing else.

    The card is filled with what the run knows. What is unmeasured is for you to measure and write.

    Example: esper policies export runs/first --name mine
    """
    from esper.api import export_policy
    from esper.leyline.policy_card import CARD
    from esper.observatory.terminal import say

    folder, card = export_policy(settings.run, settings.name, settings.out)
    console, result = consoles(settings.quiet, settings.json)
    say(result, f"policy   {folder}", whole=True)
    if settings.json:
        print_json({"policy": str(folder), "unmeasured": card.unmeasured})
    say(console, f"Still to be written in {folder / CARD}: {', '.join(card.unmeasured)}.")
    say(console, f"Use it with --controller {folder}", whole=True)
