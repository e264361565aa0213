"""The commands that list things, and the one that fetches data."""

from rich.console import Console
from rich.table import Table

from esper.tolaria.data import catalogue

WIDTH = 64


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading)
    return table


def show_data() -> None:
    root = catalogue.data_root()
    table = _table("data set", "state", "what it is")
    for name, data_set in catalogue.CATALOGUE.items():
        table.add_row(name, catalogue.status(name, root).state, data_set.description)
    console = Console()
    console.print(table)
    console.print(f"\nFolder: {root} (set ESPER_DATA to change it)", highlight=False)


def get_data(name: str) -> None:
    console = Console()
    status = catalogue.get(
        name, catalogue.data_root(), on_progress=lambda text: console.print(text, highlight=False)
    )
    console.print(f"{name}: {status.state}. {status.detail}".rstrip(), highlight=False)


def show_tasks() -> None:
    from esper.tolaria.tasks import all_tasks

    root = catalogue.data_root()
    table = _table("task", "data", "epochs", "what it is")
    for task in all_tasks().values():
        table.add_row(
            task.name, _data_state(task.data_set, root), str(task.steps), task.description
        )
    Console().print(table)


def _data_state(data_set: str, root: catalogue.Path) -> str:
    if data_set not in catalogue.CATALOGUE:
        return "its own"
    return catalogue.status(data_set, root).state


def show_blueprints() -> None:
    from esper.growth import default_catalogue
    from esper.growth.costs import example_params

    table = _table("blueprint", "kind", "fits", f"parameters at width {WIDTH}", "what it is")
    for spec in default_catalogue().specs:
        sizes = [example_params(spec, topology, WIDTH) for topology in spec.factories]
        shown = [f"{size:,}" for size in sizes if size is not None]
        if len(set(shown)) == 1:
            shown = shown[:1]
        table.add_row(
            spec.name, spec.kind, ", ".join(spec.factories), ", ".join(shown), spec.description
        )
    console = Console()
    console.print(table)
    console.print("\nA branch is counted for a network with ten outputs.", highlight=False)
