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
from esper.cli.options import add_command
from esper.cli.policies_command import export, policies, show_policy
from esper.cli.show_commands import blueprints, compare, data_get, data_list, query, tasks
from esper.cli.tracking import export_run
from esper.cli.train_command import ppo
from esper.cli.view_commands import explain, report, runs, serve, show, watch
from esper.leyline.errors import EsperError, EsperWarning, shortened

app = typer.Typer(
    name="esper",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""Neural networks that grow while they train.

Start with [bold]esper grow --task digits[/]: it trains a tiny network, lets it grow where that
helps, and shows what the growth was worth. [bold]esper tasks[/] lists what else there is.""",
)
data_app = typer.Typer(no_args_is_help=True, help="See and fetch data sets.")
policies_app = typer.Typer(help="See the policies that come with Esper, and export one.")
train_app = typer.Typer(no_args_is_help=True, help="Learn when and what to grow.")

add_command(app, grow)
add_command(app, evaluate)
app.command()(runs)
app.command()(show)
add_command(app, explain)
app.command()(report)
app.command()(watch)
add_command(app, serve)
add_command(app, export_run)
app.command()(compare)
app.command()(query)
app.command()(tasks)
app.command()(blueprints)
add_command(app, doctor)
add_command(train_app, ppo)
add_command(train_app, record)
add_command(train_app, imitate)
add_command(train_app, offline)
data_app.command("list")(data_list)
data_app.command("get")(data_get)
policies_app.callback(invoke_without_command=True)(policies)
policies_app.command("show")(show_policy)
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
    """Entry point: bad input is one sentence on stderr and exit code 2; so is a file that the
    system does not give or take."""
    warnings.showwarning = _show_warning
    try:
        app()
    except EsperError as error:
        _fail(str(error))
    except OSError as error:
        name = "" if error.filename is None else f"{shortened(str(error.filename))}: "
        _fail(f"{name}{error.strerror or error}")


def _fail(message: str) -> None:
    print(f"esper: {message}", file=sys.stderr)
    sys.exit(2)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Ours in the words that we chose; all others as Python shows them."""
    text = warnings.formatwarning(message, category, filename, lineno, line)
    if issubclass(category, EsperWarning):
        text = f"esper: {message}\n"
    print(text, end="", file=file or sys.stderr)
