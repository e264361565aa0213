"""`esper policies`: those that come with the package, and how to export one."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esper.cli.options import option

if TYPE_CHECKING:
    from esper.leyline.policy_card import PolicyCard

JSON = typer.Option("--json", help="As JSON, for other programs.")


def policies(context: typer.Context, json: Annotated[bool, JSON] = False) -> None:
    """List the policies that come with Esper; `show` tells all about one, `export` makes one."""
    if context.invoked_subcommand is not None:
        return
    from json import dumps

    from rich.console import Console

    from esper.cli.show_commands import add_row, plain_table
    from esper.leyline.policy_card import HOW_TO_TRAIN, shipped_policies
    from esper.observatory import say

    there = shipped_policies()
    if json:
        print(dumps([_row(folder, card) for folder, card in there], indent=2))
        return
    console = Console()
    if not there:
        say(console, f"No policy comes with this version of Esper; {HOW_TO_TRAIN}.")
        return
    table = plain_table("policy", "parameters", "kB", "trained on", "what it is worth")
    for folder, card in there:
        row = _row(folder, card)
        size = f"{row['bytes'] / 1000:,.0f}"
        add_row(table, card.name, f"{card.parameters:,}", size, card.trained_on, card.worth)
    console.print(table)
    say(console, "\nUse the first with --controller pretrained, any with pretrained:NAME.")


def _row(folder: Path, card: "PolicyCard") -> dict[str, Any]:
    from esper.leyline.policy_card import WEIGHTS

    told = asdict(card)
    del told["settings"]
    return {**told, "bytes": (folder / WEIGHTS).stat().st_size}


def show_policy(
    name: Annotated[str, typer.Argument(help="A policy; see `esper policies`. Or a folder.")],
    json: Annotated[bool, JSON] = False,
) -> None:
    """Print the card of a policy: what it was trained on, how it was evaluated, where it fails."""
    from json import dumps

    from rich.console import Console

    from esper.leyline.policy_card import find_policy, read_card
    from esper.observatory import say

    folder = Path(name)
    card = read_card(folder) if folder.is_dir() else find_policy(name)[1]
    if json:
        print(dumps(asdict(card), indent=2))
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
    say(Console(), "\n\n".join(parts))


@dataclass(frozen=True)
class ExportSettings:
    run: str = field(metadata={"option": typer.Argument(help="The run that trained the policy.")})
    name: str = option(..., "What it is to be called.")
    out: str = option("policies", "The folder that gets it, as a folder of that name.")


def export(settings: ExportSettings) -> None:
    """Write the policy of a training run for others to use: weights and a card, nothing else.

    The card is filled with what the run knows. What is unmeasured is for you to measure and write.

    Example: esper policies export runs/first --name mine
    """
    from rich.console import Console

    from esper.api import export_policy
    from esper.leyline.policy_card import CARD
    from esper.observatory import say

    folder, card = export_policy(settings.run, settings.name, settings.out)
    console = Console()
    say(console, f"policy   {folder}", whole=True)
    say(console, f"Still to be written in {folder / CARD}: {', '.join(card.unmeasured)}.")
    say(console, f"Use it with --controller {folder}", whole=True)
