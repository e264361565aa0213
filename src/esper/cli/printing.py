"""`--quiet` and `--json`: what a command prints, and where.

Every command that prints a result has both flags. `consoles` returns one console for progress,
files and advice, and one for the result; `print_json` prints the result as JSON.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

QUIET = "Print nothing but the result."
AS_JSON = "Print the result as JSON, and progress on stderr."
Quiet = Annotated[bool, typer.Option("--quiet", help=QUIET)]
AsJson = Annotated[bool, typer.Option("--json", help=AS_JSON)]
# Flags that change only what is printed; they are no part of the record of a run.
ONLY_PRINTING = ("quiet", "json")


def consoles(quiet: bool, as_json: bool) -> "tuple[Console, Console]":
    """The consoles for progress and for the result."""
    from rich.console import Console

    return Console(stderr=as_json, quiet=quiet), Console(quiet=as_json)


def without_printing(settings: Any) -> dict[str, Any]:
    """The settings of a command as a dict, without the flags that change only what is printed."""
    return {name: value for name, value in asdict(settings).items() if name not in ONLY_PRINTING}


def print_json(result: Any) -> None:
    """The result as one JSON value on stdout. Numbers that are not finite are null; values that
    JSON does not have, such as dates, are strings."""
    print(json.dumps(_finite(result), allow_nan=False, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(console: "Console", headings: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(escape(heading), overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
