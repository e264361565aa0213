"""The commands that show runs, and change nothing but the reports they write."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from esper.cli.options import option
from esper.cli.printing import Output
from esper.leyline.constants import MOST_COUNT, MOST_KEY

RUN = typer.Argument(help="A run or an evaluation, such as runs/first.")


def runs(
    output: Output,
    folder: Annotated[str, typer.Argument(help="The folder with the runs.")] = "runs",
) -> None:
    """List the runs of a folder and their states.

    A run is running, finished, stopped (its process has ended early) or broken.
    """
    from esper.leyline import ConfigError
    from esper.observatory.describe import summary_as_dict
    from esper.observatory.runs import find_runs
    from esper.observatory.summaries import runs_table

    if not Path(folder).is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder with your runs")
    found = find_runs(Path(folder))
    output.json([summary_as_dict(run) for run in found])
    if found:
        output.result.print(runs_table(found))
    else:
        output.say(f"no runs in {folder}; esper grow --task digits makes one")


def show(output: Output, run: Annotated[str, RUN]) -> None:
    """Print the summary of a run or an evaluation."""
    from esper.observatory.summaries import run_as_json, show_run

    show_run(output.result, Path(run))
    output.json(run_as_json(Path(run)))


def report(
    output: Output,
    run: Annotated[str, RUN],
) -> None:
    """Write a report of a run or an evaluation into its folder.

    One page that works offline: the growth as an animation, curves, tables, compute, the settings,
    and the command to reproduce the run.
    """
    from esper.observatory.report import write_report

    page = str(write_report(Path(run)))
    output.say(page, whole=True)
    output.json({"report": page})


@dataclass(frozen=True)
class ServeSettings:
    folder: str = field(
        default="runs", metadata={"option": typer.Argument(help="The folder that holds the runs.")}
    )
    port: int = option(8642, "The port; 0 takes any free one.", min=0, max=65_535)
    host: str = option(
        "127.0.0.1",
        "The address; any other than this makes the page public, protected by a printed token.",
    )


def serve(settings: ServeSettings) -> None:
    """Show runs on a web page, live: the list, one run, several compared, an evaluation.

    The page is read-only, loads nothing from other servers, and is visible on this machine only,
    unless --host is given.
    """
    from esper.leyline import PackageMissingError

    try:
        from esper.observatory.server import serve
    except ModuleNotFoundError as error:
        raise PackageMissingError(f"the web page needs {error.name}", "serve") from None

    serve(Path(settings.folder), settings.host, settings.port, partial(print, flush=True))


def watch(
    run: Annotated[str, typer.Argument(help="A run directory, such as runs/first.")],
) -> None:
    """Watch a run in the terminal, live or as a replay.

    The keys are shown; ? explains every quantity.
    """
    from esper.leyline import PackageMissingError

    try:
        from esper.observatory.watch_app import watch
    except ModuleNotFoundError as error:
        raise PackageMissingError(f"watching needs {error.name}", "watch") from None
    watch(Path(run))


@dataclass(frozen=True)
class ExplainSettings:
    run: str = field(metadata={"option": typer.Argument(help="A run, or an evaluation.")})
    step: int = option(..., "The epoch after the decision; the first is 1.", min=0, max=MOST_COUNT)
    env: int = option(0, "The environment.", min=0, max=MOST_COUNT)
    arm: str | None = option(None, "The learned policy of an evaluation, by its name there.")
    key: int | None = option(None, "The key of an evaluation.", min=0, max=MOST_KEY)


def explain(output: Output, settings: ExplainSettings) -> None:
    """Explain one step of a run: what the controller observed and decided, and what followed.

    For a learned policy this includes the probabilities of all its choices and what its mask
    forbade. Runs of `esper train ppo` do not record them: grow a network with the policy.

    Examples:

      esper explain runs/first --step 7

      esper explain runs/evaluate-digits --arm pretrained --key 3 --step 7
    """
    from esper.api import explain
    from esper.observatory.explain import explanation_in_words

    explanation = explain(
        settings.run,
        step=settings.step,
        env=settings.env,
        arm=settings.arm,
        key=settings.key,
    )
    output.say(explanation_in_words(explanation), whole=True)
    output.json(explanation)
