"""`--quiet` and `--json`: what a command prints, and where."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

QUIET = "Print nothing but the result."
AS_JSON = "Print the result as JSON, and progress on stderr."
# Flags that change nothing but what is printed: the record of a run is the same without them.
ONLY_PRINTING = ("quiet", "json")


def consoles(quiet: bool, as_json: bool) -> "tuple[Console, Console]":
    """Where progress and files are told, and where the result is shown as tables."""
    from rich.console import Console

    return Console(stderr=as_json, quiet=quiet), Console(quiet=as_json)
