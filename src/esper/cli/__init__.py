"""The `esper` command. Heavy libraries load only when a subcommand needs them."""

import sys
import warnings
from typing import Annotated, TextIO

import typer

from esper import __version__
from esper.cli.doctor_command import doctor
from esper.cli.evaluate_command import evaluate
from esper.cli.grow_command import grow
from esper.cli.learn_commands import imitate, offline, record
from esper.cli.options import add_command, as_command
from esper.cli.show_commands import (
    blueprints,
    compare,
    data_get,
    data_list,
    explain,
    export,
    policies,
    query,
    report,
    runs,
    serve,
    show,
    show_policy,
    tasks,
    watch,
)
from esper.cli.train_command import ab, ppo
from esper.leyline.errors import EsperError, EsperWarning, shortened, visible

app = typer.Typer(
    name="esper",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""Neural networks that grow while they train.

Start with [bold]esper grow --task digits[/]: it trains a tiny network, lets it grow where that
helps, and shows what the growth gained. [bold]esper tasks[/] lists the other tasks.""",
)
data_app = typer.Typer(no_args_is_help=True, help="List and download data sets.")
policies_app = typer.Typer(help="List the policies that come with Esper, and export your own.")
train_app = typer.Typer(no_args_is_help=True, help="Train policies that decide what to grow.")

for command in (
    *(grow, evaluate, runs, show, explain, report, watch, serve),
    *(compare, query, tasks, blueprints, doctor),
):
    add_command(app, command)
for train_command in (ppo, ab, record, imitate, offline):
    add_command(train_app, train_command)
add_command(data_app, data_list, "list")
add_command(data_app, data_get, "get")
policies_app.callback(invoke_without_command=True)(as_command(policies))
add_command(policies_app, show_policy, "show")
add_command(policies_app, export)
app.add_typer(policies_app, name="policies")
app.add_typer(data_app, name="data")
app.add_typer(train_app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"esper {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: wrong input, or a file that cannot be read or written, is one sentence on stderr
    and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        app()
    except EsperError as error:
        _fail(str(error))
    except OSError as error:
        name = "" if error.filename is None else f"{shortened(str(error.filename))}: "
        _fail(f"{name}{error.strerror or error}")


def _fail(message: str) -> None:
    print(f"esper: {visible(' '.join(message.splitlines()))}", file=sys.stderr)
    sys.exit(2)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings of Esper without the source line; all others as Python shows them."""
    text = warnings.formatwarning(message, category, filename, lineno, line)
    if issubclass(category, EsperWarning):
        text = f"esper: {visible(str(message))}\n"
    print(text, end="", file=file or sys.stderr)
