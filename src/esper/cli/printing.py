"""`--quiet` and `--json`: what a command prints, and where."""

import json
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esper.leyline.errors import visible

if TYPE_CHECKING:
    from rich.console import Console

FLAGS = {
    "quiet": Annotated[bool, typer.Option("--quiet", help="Print nothing but the result.")],
    "json": Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and progress on stderr.")
    ],
}


class Output:
    """Where a command prints: `progress`, files and advice on one console, its `result` on another.

    With --quiet nothing but the result is printed. With --json the result is one JSON value on
    stdout, and progress goes to stderr.
    """

    def __init__(self, quiet: bool, as_json: bool) -> None:
        from esper.observatory.terminal import SafeConsole

        self.quiet, self.as_json = quiet, as_json
        self.progress: Console = SafeConsole(stderr=as_json, quiet=quiet)
        self.result: Console = SafeConsole(quiet=as_json)

    def say(self, text: str, *, whole: bool = False) -> None:
        """Print text of the result; a `whole` line is not wrapped, so that it can be copied."""
        self.result.print(text, markup=False, highlight=False, soft_wrap=whole)

    def note(self, text: str, *, whole: bool = False) -> None:
        """Print text that is not the result, in the same way."""
        self.progress.print(text, markup=False, highlight=False, soft_wrap=whole)

    def json(self, result: Any) -> None:
        """Print the result if --json was given. Numbers that are not finite are null; values that
        JSON does not have, such as dates, are strings."""
        if self.as_json:
            print(json.dumps(_finite(result), allow_nan=False, default=str))


def same_command(flag: str) -> str:
    """The command that was given, with --resume or --overwrite."""
    words = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    return shlex.join(["esper", *words, flag])


@contextmanager
def advising(output: Output, advice: str) -> Iterator[None]:
    """Says how to go on when Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        output.note(f"stopped; {advice}", whole=True)
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(console: "Console", headings: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    # Control characters are replaced first, because that makes a cell longer.
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(escape(visible(heading)), overflow="fold")
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    console.print(table)
