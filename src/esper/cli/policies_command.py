"""`esper policies`: the policies that come with the package; export one of your own."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from esper.cli.options import option
from esper.cli.printing import Output, print_table


def policies(output: Output, context: typer.Context) -> None:
    """List the policies that come with Esper; `show` describes one, `export` writes your own."""
    if context.invoked_subcommand is not None:
        return
    from esper.leyline.policy_card import HOW_TO_TRAIN, shipped_policies

    there = shipped_policies()
    rows = [{**asdict(card), "bytes": _size(folder)} for folder, card in there]
    output.json([{name: row[name] for name in row if name != "settings"} for row in rows])
    if not there:
        output.say(f"No policy comes with this version of Esper; {HOW_TO_TRAIN}.")
        return
    shown = []
    for folder, card in there:
        size = f"{_size(folder) / 1000:,.0f}"
        shown.append((card.name, f"{card.parameters:,}", size, card.trained_on, card.worth))
    print_table(output.result, ("policy", "parameters", "kB", "trained on", "results"), shown)
    output.note("\nUse the first with --controller pretrained, any with pretrained:NAME.")


def _size(folder: Path) -> int:
    from esper.leyline.policy_card import WEIGHTS

    return (folder / WEIGHTS).stat().st_size


def show_policy(
    output: Output,
    name: Annotated[str, typer.Argument(help="A policy; see `esper policies`. Or a folder.")],
) -> None:
    """Print the card of a policy: what it was trained on, how it was evaluated, where it fails."""
    from esper.leyline.policy_card import find_policy, read_card

    folder = Path(name)
    card = read_card(folder) if folder.is_dir() else find_policy(name)[1]
    output.json(asdict(card))
    settings = "\n".join(f"  {key} = {value}" for key, value in card.settings.items())
    parts = [
        f"{card.name}: {card.worth}",
        f"Trained on\n  {card.trained_on}",
        f"Evaluated\n  {card.evaluated}",
        f"Where it fails\n  {card.fails}",
        f"Parameters\n  {card.parameters:,}",
        f"Settings\n{settings}",
    ]
    output.say("\n\n".join(parts))


@dataclass(frozen=True)
class ExportSettings:
    run: str = field(metadata={"option": typer.Argument(help="The run that trained the policy.")})
    name: str = option(..., "Name of the policy.")
    out: str = option("policies", "Folder to write to; the policy is a folder of that name in it.")


def export(output: Output, settings: ExportSettings) -> None:
    """Write the policy of a training run to a folder for other users: weights and a card.

    The card has facts about the run. Fields that are unmeasured are for you to fill in.

    Example: esper policies export runs/first --name mine
    """
    from esper.api import export_policy
    from esper.leyline.policy_card import CARD

    folder, card = export_policy(settings.run, settings.name, settings.out)
    output.say(f"policy   {folder}", whole=True)
    output.json({"policy": str(folder), "unmeasured": card.unmeasured})
    output.note(f"Fill in {folder / CARD}: {', '.join(card.unmeasured)}.")
    output.note(f"Use it with --controller {folder}", whole=True)
