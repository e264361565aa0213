"""`esper policies`: the policies that come with the package; export one of your own."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from esper.cli.options import option
from esper.cli.printing import (
    AS_JSON,
    QUIET,
    AsJson,
    Quiet,
    consoles,
    print_json,
    print_table,
)


def policies(context: typer.Context, quiet: Quiet = False, json: AsJson = False) -> None:
    """List the policies that come with Esper; `show` describes one, `export` writes your own."""
    if context.invoked_subcommand is not None:
        return
    from esper.leyline.policy_card import HOW_TO_TRAIN, shipped_policies
    from esper.observatory.terminal import say

    there = shipped_policies()
    if json:
        rows = [{**asdict(card), "bytes": _size(folder)} for folder, card in there]
        print_json([{name: row[name] for name in row if name != "settings"} for row in rows])
        return
    console, result = consoles(quiet, json)
    if not there:
        say(result, f"No policy comes with this version of Esper; {HOW_TO_TRAIN}.")
        return
    shown = []
    for folder, card in there:
        size = f"{_size(folder) / 1000:,.0f}"
        shown.append((card.name, f"{card.parameters:,}", size, card.trained_on, card.worth))
    print_table(result, ("policy", "parameters", "kB", "trained on", "results"), shown)
    say(console, "\nUse the first with --controller pretrained, any with pretrained:NAME.")


def _size(folder: Path) -> int:
    from esper.leyline.policy_card import WEIGHTS

    return (folder / WEIGHTS).stat().st_size


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
    name: str = option(..., "Name of the policy.")
    out: str = option("policies", "Folder to write to; the policy is a folder of that name in it.")
    quiet: bool = option(False, QUIET)
    json: bool = option(False, AS_JSON)


def export(settings: ExportSettings) -> None:
    """Write the policy of a training run to a folder for other users: weights and a card.

    The card has facts about the run. Fields that are unmeasured are for you to fill in.

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
    say(console, f"Fill in {folder / CARD}: {', '.join(card.unmeasured)}.")
    say(console, f"Use it with --controller {folder}", whole=True)
