"""`esper compare`, `query`, `tasks`, `blueprints`, `data` and `policies`."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from esper.cli.options import option
from esper.cli.printing import Output, print_table
from esper.leyline.constants import MOST_COUNT

WIDTH = 64


def compare(
    output: Output,
    runs: Annotated[list[str], typer.Argument(help="Run directories, such as runs/first.")],
) -> None:
    """Show the outcomes of runs side by side: means over their episodes."""
    from esper.observatory.summaries import compare_runs, comparison_table

    rows = compare_runs([Path(run) for run in runs])
    output.result.print(comparison_table(rows))
    output.json(rows)


def query(
    output: Output,
    run: Annotated[str, typer.Argument(help="A run directory, such as runs/first.")],
    sql: Annotated[
        str, typer.Argument(help="A SELECT over the tables events, metrics and outcomes.")
    ],
    limit: Annotated[int, typer.Option(help="Maximum rows to show.", min=1, max=MOST_COUNT)] = 1000,
    timeout: Annotated[float, typer.Option(help="Maximum time in seconds.", max=MOST_COUNT)] = 60.0,
) -> None:
    """Query a run directory in SQL.

    Example: esper query runs/first "select env, val_score, params from outcomes order by 2 desc"
    """
    from esper.observatory.query import query

    answer = query(Path(run), sql, limit=limit, timeout=timeout)
    shown = [["" if value is None else str(value) for value in row] for row in answer.rows]
    print_table(output.result, answer.columns, shown)
    output.json([dict(zip(answer.columns, row, strict=True)) for row in answer.rows])
    if not answer.complete:
        output.note(f"\nThere are more rows than these {limit}; --limit shows more.")


def tasks(output: Output) -> None:
    """List the tasks and the state of their data."""
    from esper.tolaria.data import catalogue
    from esper.tolaria.tasks import all_tasks

    root, rows = catalogue.data_root(), []
    for task in all_tasks().values():
        known = task.data_set in catalogue.CATALOGUE
        state = str(catalogue.status(task.data_set, root).state) if known else "its own"
        row = {"task": task.name, "data": state, "epochs": task.steps}
        rows.append({**row, "description": task.description})
    shown = [map(str, row.values()) for row in rows]
    print_table(output.result, ("task", "data", "epochs", "description"), shown)
    output.json(rows)


def blueprints(output: Output) -> None:
    """List the blueprints: what can grow, where it fits and what it costs."""
    from esper.growth.blueprints.catalogue import default_catalogue, example_params

    rows, shown = [], []
    for spec in default_catalogue().specs:
        sizes = {kind: example_params(spec, kind, WIDTH) for kind in spec.factories}
        params = [f"{size:,}" for size in sizes.values() if size is not None]
        params = params[:1] if len(set(params)) == 1 else params
        fits = ", ".join(spec.factories)
        shown.append((spec.name, spec.kind, fits, ", ".join(params), spec.description))
        row = {"blueprint": spec.name, "kind": spec.kind, "description": spec.description}
        rows.append({**row, "params": sizes})
    headings = ("blueprint", "kind", "fits", f"parameters at width {WIDTH}", "description")
    print_table(output.result, headings, shown)
    output.json({"width": WIDTH, "blueprints": rows})
    output.note(
        "\nParameters of a branch are for a network with ten outputs, those of a bypass for two\n"
        "layers of that width (convolutions of width 3 for maps).",
    )


def data_list(output: Output) -> None:
    """List the data sets and their state."""
    from esper.tolaria.data import catalogue

    root = catalogue.data_root()
    rows = [
        {
            "data_set": name,
            "state": str(catalogue.status(name, root).state),
            "description": data_set.description,
        }
        for name, data_set in catalogue.CATALOGUE.items()
    ]
    print_table(output.result, ("data set", "state", "description"), [row.values() for row in rows])
    output.json({"folder": str(root), "data_sets": rows})
    output.note(f"\nFolder: {root} (set ESPER_DATA to change it)")


def data_get(
    output: Output,
    name: Annotated[str, typer.Argument(help="A data set; see `esper data list`.")],
) -> None:
    """Download a data set and verify its checksums."""
    from esper.tolaria.data import catalogue

    status = catalogue.get(name, catalogue.data_root(), on_progress=output.note)
    output.say(f"{name}: {status.state}. {status.detail}".rstrip())
    output.json({"data_set": name, "state": str(status.state), "detail": status.detail})


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
