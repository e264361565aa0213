"""`esper compare`, `query`, `tasks`, `blueprints` and `data`."""

from pathlib import Path
from typing import Annotated

import typer

from esper.cli.printing import Output, print_table
from esper.leyline.constants import MOST_COUNT

WIDTH = 64


def compare(
    output: Output,
    runs: Annotated[list[str], typer.Argument(help="Run directories, such as runs/first.")],
) -> None:
    """Show the outcomes of runs side by side: means over their episodes."""
    from esper.observatory.comparison import compare_runs, comparison_table

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
