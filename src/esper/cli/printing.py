"""`--quiet` and `--json`: what a command prints, and where.

Every command that prints a result has both. It asks `consoles` where to print: progress, files and
advice on the one, the result on the other, and the result once more with `print_json`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

QUIET = "Print nothing but the result."
AS_JSON = "Print the result as JSON, and progress on stderr."
Quiet = Annotated[bool, typer.Option("--quiet", help=QUIET)]
AsJson = Annotated[bool, typer.Option("--json", help=AS_JSON)]
# Flags that change nothing but what is printed: the record of a run is the same without them.
ONLY_PRINTING = ("quiet", "json")


def consoles(quiet: bool, as_json: bool) -> "tuple[Console, Console]":
    """Where progress and files are told, and where the result is shown as tables."""
    from rich.console import Console

    return Console(stderr=as_json, quiet=quiet), Console(quiet=as_json)


def without_printing(settings: Any) -> dict[str, Any]:
    """What a command was given, as a dict, without the flags that only change what is printed."""
    return {name: value for name, value in asdict(settings).items() if name not in ONLY_PRINTING}


def print_json(result: Any) -> None:
    """The result for other programs: one JSON value, alone on stdout. A number that is not finite
    is null; what JSON has no word for, such as a date, is text."""
    print(json.dumps(_finite(result), allow_nan=False, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
