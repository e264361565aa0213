"""The commands that show what there is: runs, tasks, blueprints, data; and the one that fetches."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esper.leyline.constants import MOST_COUNT

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 64


def compare(
    runs: Annotated[list[str], typer.Argument(help="Run directories, such as runs/first.")],
) -> None:
    """Show the outcomes of runs side by side: means over their episodes."""
    from rich.console import Console

    from esper.observatory import compare_runs, comparison_table

    Console().print(comparison_table(compare_runs([Path(run) for run in runs])))


def query(
    run: Annotated[str, typer.Argument(help="A run directory, such as runs/first.")],
    sql: Annotated[
        str, typer.Argument(help="A SELECT over the tables events, metrics and outcomes.")
    ],
    limit: Annotated[int, typer.Option(help="Most rows to show.", min=1, max=MOST_COUNT)] = 1000,
    timeout: Annotated[
        float, typer.Option(help="Seconds that it may take.", max=MOST_COUNT)
    ] = 60.0,
) -> None:
    """Ask a run directory a question in SQL.

    Example: esper query runs/first "select env, val_score, params from outcomes order by 2 desc"
    """
    from rich.console import Console

    from esper.observatory import query, say

    answer = query(Path(run), sql, limit=limit, timeout=timeout)
    table = plain_table(*answer.columns)
    for row in answer.rows:
        add_row(table, *("" if value is None else str(value) for value in row))
    console = Console()
    console.print(table)
    if not answer.complete:
        say(console, f"\nThere are more rows than these {limit}; --limit shows more.")


def tasks(
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the tasks and whether their data is there."""
    from rich.console import Console

    from esper.tolaria import all_tasks
    from esper.tolaria.data import catalogue

    root = catalogue.data_root()
    table, rows = plain_table("task", "data", "epochs", "what it is"), []
    for task in all_tasks().values():
        known = task.data_set in catalogue.CATALOGUE
        state = str(catalogue.status(task.data_set, root).state) if known else "its own"
        add_row(table, task.name, state, str(task.steps), task.description)
        row = {"task": task.name, "data": state, "epochs": task.steps}
        rows.append({**row, "description": task.description})
    if as_json:
        print(json.dumps(rows))
    else:
        Console().print(table)


def blueprints() -> None:
    """List what can be grown, where it fits and what it costs."""
    from rich.console import Console

    from esper.growth import default_catalogue, example_params
    from esper.observatory import say

    table = plain_table("blueprint", "kind", "fits", f"parameters at width {WIDTH}", "what it is")
    for spec in default_catalogue().specs:
        sizes = [example_params(spec, topology, WIDTH) for topology in spec.factories]
        shown = [f"{size:,}" for size in sizes if size is not None]
        if len(set(shown)) == 1:
            shown = shown[:1]
        fits = ", ".join(spec.factories)
        add_row(table, spec.name, spec.kind, fits, ", ".join(shown), spec.description)
    console = Console()
    console.print(table)
    say(
        console,
        "\nA branch is counted for a network with ten outputs, a bypass between two layers of",
    )
    say(console, "that width (convolutions of width 3 for maps).")


def data_list() -> None:
    """List the data sets and whether they are there."""
    from rich.console import Console

    from esper.observatory import say
    from esper.tolaria.data import catalogue

    root = catalogue.data_root()
    table = plain_table("data set", "state", "what it is")
    for name, data_set in catalogue.CATALOGUE.items():
        add_row(table, name, catalogue.status(name, root).state, data_set.description)
    console = Console()
    console.print(table)
    say(console, f"\nFolder: {root} (set ESPER_DATA to change it)")


def data_get(
    name: Annotated[str, typer.Argument(help="A data set; see `esper data list`.")],
) -> None:
    """Fetch a data set and verify its checksums."""
    from rich.console import Console

    from esper.observatory import say
    from esper.tolaria.data import catalogue

    console = Console()
    status = catalogue.get(name, catalogue.data_root(), on_progress=lambda text: say(console, text))
    say(console, f"{name}: {status.state}. {status.detail}".rstrip())


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
