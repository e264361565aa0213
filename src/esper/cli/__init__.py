"""The `esper` command. Heavy libraries load only when a subcommand needs them."""

import sys
from typing import Annotated

import typer

from esper import __version__
from esper.cli import learn_commands, train_commands
from esper.leyline.errors import EsperError

app = typer.Typer(
    name="esper",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    help="""Neural networks that grow while they train.

Start with [bold]esper grow --task digits[/]: it trains a tiny network, lets it grow where that
helps, and shows what the growth was worth. [bold]esper tasks[/] lists what else there is.""",
)
data_app = typer.Typer(no_args_is_help=True, help="See and fetch data sets.")
app.add_typer(data_app, name="data")
# Both modules register their commands in this one group.
assert train_commands.train_app is learn_commands.train_app
app.add_typer(train_commands.train_app, name="train")


def main() -> None:
    """Entry point: bad input is one sentence on stderr and exit code 2."""
    try:
        app()
    except EsperError as error:
        print(f"esper: {error}", file=sys.stderr)
        sys.exit(2)


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


@app.command()
def grow(
    task: Annotated[str, typer.Option(help="What to learn; see `esper tasks`.")] = "digits",
    controller: Annotated[
        str,
        typer.Option(
            help="Who decides: heuristic, random, static (never grow), scripted:FILE, "
            "where FILE may be the actions.txt of an earlier run, or the folder of a training run."
        ),
    ] = "heuristic",
    key: Annotated[int, typer.Option(min=0, help="Same key, same run, byte for byte.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Epochs to train; each task has its default.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Folder for the record of the run. Default: runs/TASK-CONTROLLER-SEED."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that is already there.")] = False,
    max_params: Annotated[
        float | None,
        typer.Option(help="Most parameters, as a multiple of the host's, such as 1.5."),
    ] = None,
    max_macs: Annotated[
        float | None,
        typer.Option(help="Most multiply-adds, as a multiple of the host's."),
    ] = None,
    incubation: Annotated[
        str,
        typer.Option(
            help="isolated: a seed learns without acting before it is blended in; "
            "joint: it is blended in from birth."
        ),
    ] = "isolated",
    compare: Annotated[
        bool,
        typer.Option(help="Also train the host alone, and the grown topology from scratch."),
    ] = True,
) -> None:
    """Train a task's network and let it grow.

    Ends with a table of what the growth was worth on test data, and a picture of it. Ctrl-C ends
    the run early; what was reached until then is saved.

    Examples:

      esper grow --task digits

      esper grow --task pydocs --controller random --key 3

      esper grow --controller scripted:runs/first/actions.txt
    """
    from esper.cli.grow_command import GrowSettings, run

    run(
        GrowSettings(
            task=task,
            controller=controller,
            key=key,
            steps=steps,
            out=out or f"runs/{task}-{controller.split('/')[-1].replace(':', '-')}-{key}",
            overwrite=overwrite,
            max_params=max_params,
            max_macs=max_macs,
            incubation=incubation,
            compare=compare,
        )
    )


@app.command()
def evaluate(
    task: Annotated[str, typer.Option(help="What to learn; see `esper tasks`.")] = "digits",
    arms: Annotated[
        str,
        typer.Option(
            help="Who is compared, with commas: static, random, heuristic, scripted:NAME, "
            "or the run directory of a learned policy."
        ),
    ] = "static,random,scripted:early,heuristic",
    keys: Annotated[int, typer.Option(min=1, help="Paired keys: each arm trains on each.")] = 20,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Epochs to train; each task has its default.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for the results. Default: runs/evaluate-TASK.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace an evaluation that is already there.")
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(help="Let every arm choose its learning rate, from one grid, on validation."),
    ] = False,
    controls: Annotated[
        bool,
        typer.Option(
            help="Also train static networks: what was grown, from scratch, and the best width."
        ),
    ] = True,
    control_for: Annotated[
        str | None,
        typer.Option(help="The arm that the controls are made for. Default: the last that grows."),
    ] = None,
) -> None:
    """Compare controllers on paired keys, on test data, and with honest controls.

    Prints two tables and writes evaluation.json, trials.csv and evaluation.png. Ctrl-C ends early
    with the keys that are complete.

    Examples:

      esper evaluate --task digits --arms static,random,heuristic --keys 20 --tune

      esper evaluate --arms static,heuristic,runs/first --control-for heuristic
    """
    from esper.cli.evaluate_commands import EvaluateCommand, run_evaluate

    run_evaluate(
        EvaluateCommand(
            task=task,
            arms=arms,
            keys=keys,
            steps=steps,
            out=out or f"runs/evaluate-{task}",
            overwrite=overwrite,
            tune=tune,
            controls=controls,
            control_for=control_for,
        )
    )


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Run directories, such as runs/first.")],
) -> None:
    """Show the outcomes of runs side by side: means over their episodes."""
    from esper.cli.run_commands import show_comparison

    show_comparison(runs)


@app.command()
def query(
    run: Annotated[str, typer.Argument(help="A run directory, such as runs/first.")],
    sql: Annotated[
        str, typer.Argument(help="A SELECT over the tables events, metrics and outcomes.")
    ],
) -> None:
    """Ask a run directory a question in SQL.

    Example: esper query runs/first "select env, val_score, params from outcomes order by 2 desc"
    """
    from esper.cli.run_commands import show_query

    show_query(run, sql)


@app.command()
def tasks() -> None:
    """List the tasks and whether their data is there."""
    from esper.cli.lists import show_tasks

    show_tasks()


@app.command()
def blueprints() -> None:
    """List what can be grown, where it fits and what it costs."""
    from esper.cli.lists import show_blueprints

    show_blueprints()


@data_app.command("list")
def data_list() -> None:
    """List the data sets and whether they are there."""
    from esper.cli.lists import show_data

    show_data()


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A data set; see `esper data list`.")],
) -> None:
    """Fetch a data set and verify its checksums."""
    from esper.cli.lists import get_data

    get_data(name)
