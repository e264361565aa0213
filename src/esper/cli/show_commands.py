"""`esper compare`, `query`, `tasks`, `blueprints` and `data`."""

from pathlib import Path
from typing import Annotated

import typer

from esper.cli.printing import AsJson, Quiet, consoles, print_json, print_table
from esper.leyline.constants import MOST_COUNT

WIDTH = 64


def compare(
    runs: Annotated[list[str], typer.Argument(help="Run directories, such as runs/first.")],
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Show the outcomes of runs side by side: means over their episodes."""
    from esper.observatory.comparison import compare_runs, comparison_table

    _, result = consoles(quiet, json)
    rows = compare_runs([Path(run) for run in runs])
    result.print(comparison_table(rows))
    if json:
        print_json(rows)


def query(
    run: Annotated[str, typer.Argument(help="A run directory, such as runs/first.")],
    sql: Annotated[
        str, typer.Argument(help="A SELECT over the tables events, metrics and outcomes.")
    ],
    limit: Annotated[int, typer.Option(help="Maximum rows to show.", min=1, max=MOST_COUNT)] = 1000,
    timeout: Annotated[float, typer.Option(help="Maximum time in seconds.", max=MOST_COUNT)] = 60.0,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Query a run directory in SQL.

    Example: esper query runs/first "select env, val_score, params from outcomes order by 2 desc"
    """
    from esper.observatory.query import query
    from esper.observatory.terminal import say

    answer = query(Path(run), sql, limit=limit, timeout=timeout)
    console, result = consoles(quiet, json)
    shown = [["" if value is None else str(value) for value in row] for row in answer.rows]
    print_table(result, answer.columns, shown)
    if json:
        print_json([dict(zip(answer.columns, row, strict=True)) for row in answer.rows])
    if not answer.complete:
        say(console, f"\nThere are more rows than these {limit}; --limit shows more.")


def tasks(quiet: Quiet = False, json: AsJson = False) -> None:
    """List the tasks and the state of their data."""
    from esper.tolaria.data import catalogue
    from esper.tolaria.tasks import all_tasks

    root, rows = catalogue.data_root(), []
    for task in all_tasks().values():
        known = task.data_set in catalogue.CATALOGUE
        state = str(catalogue.status(task.data_set, root).state) if known else "its own"
        row = {"task": task.name, "data": state, "epochs": task.steps}
        rows.append({**row, "description": task.description})
    _, result = consoles(quiet, json)
    shown = [map(str, row.values()) for row in rows]
    print_table(result, ("task", "data", "epochs", "description"), shown)
    if json:
        print_json(rows)


def blueprints(quiet: Quiet = False, json: AsJson = False) -> None:
    """List the blueprints: what can grow, where it fits and what it costs."""
    from esper.growth.blueprints.catalogue import default_catalogue, example_params
    from esper.observatory.terminal import say

    rows, shown = [], []
    for spec in default_catalogue().specs:
        sizes = {kind: example_params(spec, kind, WIDTH) for kind in spec.factories}
        params = [f"{size:,}" for size in sizes.values() if size is not None]
        params = params[:1] if len(set(params)) == 1 else params
        fits = ", ".join(spec.factories)
        shown.append((spec.name, spec.kind, fits, ", ".join(params), spec.description))
        row = {"blueprint": spec.name, "kind": spec.kind, "description": spec.description}
        rows.append({**row, "params": sizes})
    console, result = consoles(quiet, json)
    headings = ("blueprint", "kind", "fits", f"parameters at width {WIDTH}", "description")
    print_table(result, headings, shown)
    if json:
        print_json({"width": WIDTH, "blueprints": rows})
    say(
        console,
        "\nParameters of a branch are for a network with ten outputs, those of a bypass for two\n"
        "layers of that width (convolutions of width 3 for maps).",
    )


def data_list(quiet: Quiet = False, json: AsJson = False) -> None:
    """List the data sets and their state."""
    from esper.observatory.terminal import say
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
    console, result = consoles(quiet, json)
    print_table(result, ("data set", "state", "description"), [row.values() for row in rows])
    if json:
        print_json({"folder": str(root), "data_sets": rows})
    say(console, f"\nFolder: {root} (set ESPER_DATA to change it)")


def data_get(
    name: Annotated[str, typer.Argument(help="A data set; see `esper data list`.")],
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Download a data set and verify its checksums."""
    from esper.observatory.terminal import say
    from esper.tolaria.data import catalogue

    console, result = consoles(quiet, json)
    status = catalogue.get(name, catalogue.data_root(), on_progress=lambda text: say(console, text))
    say(result, f"{name}: {status.state}. {status.detail}".rstrip())
    if json:
        print_json({"data_set": name, "state": str(status.state), "detail": status.detail})
