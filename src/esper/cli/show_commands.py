"""The commands that show what there is: runs, tasks, blueprints, data; and the one that fetches."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esper.cli.printing import AsJson, Quiet, consoles, print_json
from esper.leyline.constants import MOST_COUNT

if TYPE_CHECKING:
    from rich.table import Table

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
    limit: Annotated[int, typer.Option(help="Most rows to show.", min=1, max=MOST_COUNT)] = 1000,
    timeout: Annotated[
        float, typer.Option(help="Seconds that it may take.", max=MOST_COUNT)
    ] = 60.0,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Ask a run directory a question in SQL.

    Example: esper query runs/first "select env, val_score, params from outcomes order by 2 desc"
    """
    from esper.observatory.query import query
    from esper.observatory.terminal import say

    answer = query(Path(run), sql, limit=limit, timeout=timeout)
    table = plain_table(*answer.columns)
    for row in answer.rows:
        add_row(table, *("" if value is None else str(value) for value in row))
    console, result = consoles(quiet, json)
    result.print(table)
    if json:
        print_json([dict(zip(answer.columns, row, strict=True)) for row in answer.rows])
    if not answer.complete:
        say(console, f"\nThere are more rows than these {limit}; --limit shows more.")


def tasks(quiet: Quiet = False, json: AsJson = False) -> None:
    """List the tasks and whether their data is there."""
    from esper.tolaria.data import catalogue
    from esper.tolaria.tasks import all_tasks

    root = catalogue.data_root()
    table, rows = plain_table("task", "data", "epochs", "what it is"), []
    for task in all_tasks().values():
        known = task.data_set in catalogue.CATALOGUE
        state = str(catalogue.status(task.data_set, root).state) if known else "its own"
        add_row(table, task.name, state, str(task.steps), task.description)
        row = {"task": task.name, "data": state, "epochs": task.steps}
        rows.append({**row, "description": task.description})
    _, result = consoles(quiet, json)
    result.print(table)
    if json:
        print_json(rows)


def blueprints(quiet: Quiet = False, json: AsJson = False) -> None:
    """List what can be grown, where it fits and what it costs."""
    from esper.growth.blueprints.catalogue import default_catalogue, example_params
    from esper.observatory.terminal import say

    table = plain_table("blueprint", "kind", "fits", f"parameters at width {WIDTH}", "what it is")
    rows = []
    for spec in default_catalogue().specs:
        sizes = [example_params(spec, topology, WIDTH) for topology in spec.factories]
        shown = [f"{size:,}" for size in sizes if size is not None]
        if len(set(shown)) == 1:
            shown = shown[:1]
        fits = ", ".join(spec.factories)
        add_row(table, spec.name, spec.kind, fits, ", ".join(shown), spec.description)
        row = {"blueprint": spec.name, "kind": spec.kind, "description": spec.description}
        rows.append({**row, "params": dict(zip(spec.factories, sizes, strict=True))})
    console, result = consoles(quiet, json)
    result.print(table)
    if json:
        print_json({"width": WIDTH, "blueprints": rows})
    say(
        console,
        "\nA branch is counted for a network with ten outputs, a bypass between two layers of",
    )
    say(console, "that width (convolutions of width 3 for maps).")


def data_list(quiet: Quiet = False, json: AsJson = False) -> None:
    """List the data sets and whether they are there."""
    from esper.observatory.terminal import say
    from esper.tolaria.data import catalogue

    root = catalogue.data_root()
    table, rows = plain_table("data set", "state", "what it is"), []
    for name, data_set in catalogue.CATALOGUE.items():
        state = str(catalogue.status(name, root).state)
        add_row(table, name, state, data_set.description)
        rows.append({"data_set": name, "state": state, "description": data_set.description})
    console, result = consoles(quiet, json)
    result.print(table)
    if json:
        print_json({"folder": str(root), "data_sets": rows})
    say(console, f"\nFolder: {root} (set ESPER_DATA to change it)")


def data_get(
    name: Annotated[str, typer.Argument(help="A data set; see `esper data list`.")],
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Fetch a data set and verify its checksums."""
    from esper.observatory.terminal import say
    from esper.tolaria.data import catalogue

    console, result = consoles(quiet, json)
    status = catalogue.get(name, catalogue.data_root(), on_progress=lambda text: say(console, text))
    say(result, f"{name}: {status.state}. {status.detail}".rstrip())
    if json:
        print_json({"data_set": name, "state": str(status.state), "detail": status.detail})


def plain_table(*headings: str) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(escape(heading), overflow="fold")
    return table


def add_row(table: "Table", *words: str) -> None:
    from rich.markup import escape

    table.add_row(*map(escape, words))
