"""The commands that show runs, tasks, blueprints, data sets and policies."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from esper.cli.printing import Output, print_table
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


def serve(
    folder: Annotated[str, typer.Argument(help="The folder that holds the runs.")] = "runs",
    port: Annotated[
        int, typer.Option(help="The port; 0 takes any free one.", min=0, max=65_535)
    ] = 8642,
    host: Annotated[
        str,
        typer.Option(
            help="The address; any other makes the page public, protected by a printed token."
        ),
    ] = "127.0.0.1",
) -> None:
    """Show runs on a web page, live: the list, one run, several compared, an evaluation.

    The page is read-only, loads nothing from other servers, and is visible on this machine only,
    unless --host is given.
    """
    from esper.leyline import PackageMissingError

    try:
        from esper.observatory.server import serve
    except ModuleNotFoundError as error:
        raise PackageMissingError(f"the web page needs {error.name}", "serve") from None

    serve(Path(folder), host, port, partial(print, flush=True))


def watch(
    run: Annotated[str, typer.Argument(help="A run directory, such as runs/first.")],
) -> None:
    """Watch a run in the terminal, live or epoch by epoch.

    The keys are shown; ? explains every quantity.
    """
    from esper.leyline import PackageMissingError

    try:
        from esper.observatory.watch_app import watch
    except ModuleNotFoundError as error:
        raise PackageMissingError(f"watching needs {error.name}", "watch") from None
    watch(Path(run))


def explain(
    output: Output,
    run: Annotated[str, RUN],
    step: Annotated[
        int,
        typer.Option(help="The epoch after the decision; the first is 1.", min=0, max=MOST_COUNT),
    ],
    env: Annotated[int, typer.Option(help="The environment.", min=0, max=MOST_COUNT)] = 0,
    arm: Annotated[
        str | None, typer.Option(help="The learned policy of an evaluation, by its name there.")
    ] = None,
    key: Annotated[
        int | None, typer.Option(help="The key of an evaluation.", min=0, max=MOST_KEY)
    ] = None,
) -> None:
    """Explain one step of a run: what the controller observed and decided, and what followed.

    For a learned policy this includes the probabilities of all its choices and what its mask
    forbade. Runs of `esper train ppo` do not record them: grow a network with the policy.

    Examples:

      esper explain runs/first --step 7

      esper explain runs/evaluate-digits --arm pretrained --key 3 --step 7
    """
    from esper.api import explain
    from esper.observatory.explain import explanation_in_words

    explanation = explain(run, step=step, env=env, arm=arm, key=key)
    output.say(explanation_in_words(explanation), whole=True)
    output.json(explanation)


def compare(
    output: Output,
    runs: Annotated[list[str], typer.Argument(help="Run directories, such as runs/first.")],
) -> None:
    """Show the outcomes of runs side by side: means over their episodes."""
    from esper.observatory.summaries import compare_runs, comparison_table

    rows = compare_runs([Path(run) for run in runs])
    output.result.print(comparison_table(rows))
    output.json(rows)


def query(
    output: Output,
    run: Annotated[str, typer.Argument(help="A run directory, such as runs/first.")],
    sql: Annotated[
        str, typer.Argument(help="A SELECT over the tables events, metrics and outcomes.")
    ],
    limit: Annotated[int, typer.Option(help="Maximum rows to show.", min=1, max=MOST_COUNT)] = 1000,
    timeout: Annotated[float, typer.Option(help="Maximum time in seconds.", max=MOST_COUNT)] = 60.0,
) -> None:
    """Query a run directory in SQL.

    Example: esper query runs/first "select env, val_score, params from outcomes order by 2 desc"
    """
    from esper.observatory.query import query

    answer = query(Path(run), sql, limit=limit, timeout=timeout)
    shown = [["" if value is None else str(value) for value in row] for row in answer.rows]
    print_table(output.result, answer.columns, shown)
    output.json([dict(zip(answer.columns, row, strict=True)) for row in answer.rows])
    if not answer.complete:
        output.note(f"\nThere are more rows than these {limit}; --limit shows more.")


def tasks(output: Output) -> None:
    """List the tasks and the state of their data."""
    from esper.tolaria.data import catalogue
    from esper.tolaria.tasks import all_tasks

    root, rows = catalogue.data_root(), []
    for task in all_tasks().values():
        known = task.data_set in catalogue.CATALOGUE
        state = str(catalogue.status(task.data_set, root).state) if known else "its own"
        row = {"task": task.name, "data": state, "epochs": task.steps}
        rows.append({**row, "description": task.description})
    shown = [map(str, row.values()) for row in rows]
    print_table(output.result, ("task", "data", "epochs", "description"), shown)
    output.json(rows)


def blueprints(output: Output) -> None:
    """List the blueprints: what can grow, and where it fits."""
    from esper.growth.blueprints.catalogue import default_catalogue

    rows = [
        {
            "blueprint": spec.name,
            "kind": spec.kind,
            "fits": ", ".join(spec.factories),
            "description": spec.description,
        }
        for spec in default_catalogue().specs
    ]
    print_table(output.result, list(rows[0]), [row.values() for row in rows])
    output.json(rows)


def data_list(output: Output) -> None:
    """List the data sets and their state."""
    from esper.tolaria.data import catalogue

    root = catalogue.data_root()
    rows = [
        {
            "data_set": name,
            "state": str(catalogue.status(name, root).state),
            "description": data_set.description,
        }
        for name, data_set in catalogue.CATALOGUE.items()
    ]
    print_table(output.result, ("data set", "state", "description"), [row.values() for row in rows])
    output.json({"folder": str(root), "data_sets": rows})
    output.note(f"\nFolder: {root} (set ESPER_DATA to change it)")


def data_get(
    output: Output,
    name: Annotated[str, typer.Argument(help="A data set; see `esper data list`.")],
) -> None:
    """Download a data set and verify its checksums."""
    from esper.tolaria.data import catalogue

    status = catalogue.get(name, catalogue.data_root(), on_progress=output.note)
    output.say(f"{name}: {status.state}. {status.detail}".rstrip())
    output.json({"data_set": name, "state": str(status.state), "detail": status.detail})


def policies(output: Output, context: typer.Context) -> None:
    """List the policies that come with Esper; `show` describes one, `export` writes your own."""
    if context.invoked_subcommand is not None:
        return
    from esper.leyline.policy_card import HOW_TO_TRAIN, shipped_policies

    cards = [card for _, card in shipped_policies()]
    output.json([asdict(card) for card in cards])
    if not cards:
        output.say(f"No policy comes with this version of Esper; {HOW_TO_TRAIN}.")
        return
    rows = [(card.name, f"{card.parameters:,}", card.trained_on, card.worth) for card in cards]
    print_table(output.result, ("policy", "parameters", "trained on", "results"), rows)
    output.note("\nUse the first with --controller pretrained, any with pretrained:NAME.")


def show_policy(
    output: Output,
    name: Annotated[str, typer.Argument(help="A policy; see `esper policies`. Or a folder.")],
) -> None:
    """Print the card of a policy: what it was trained on, how it was evaluated, where it fails."""
    from esper.leyline.policy_card import find_policy, read_card

    folder = Path(name)
    card = read_card(folder) if folder.is_dir() else find_policy(name)[1]
    output.json(asdict(card))
    settings = "\n".join(f"  {key} = {value}" for key, value in card.settings.items())
    parts = [
        f"{card.name}: {card.worth}",
        f"Trained on\n  {card.trained_on}",
        f"Evaluated\n  {card.evaluated}",
        f"Where it fails\n  {card.fails}",
        f"Parameters\n  {card.parameters:,}",
        f"Settings\n{settings}",
    ]
    output.say("\n\n".join(parts))


def export(
    output: Output,
    run: Annotated[str, typer.Argument(help="The run that trained the policy.")],
    name: Annotated[str, typer.Option(help="Name of the policy.")],
    out: Annotated[
        str, typer.Option(help="Folder to write to; the policy is a folder of that name in it.")
    ] = "policies",
) -> None:
    """Write the policy of a training run to a folder for other users: weights and a card.

    The card has facts about the run. Fields that are unmeasured are for you to fill in.

    Example: esper policies export runs/first --name mine
    """
    from esper.api import export_policy
    from esper.leyline.policy_card import CARD

    folder, card = export_policy(run, name, out)
    output.say(f"policy   {folder}", whole=True)
    output.json({"policy": str(folder), "unmeasured": card.unmeasured})
    output.note(f"Fill in {folder / CARD}: {', '.join(card.unmeasured)}.")
    output.note(f"Use it with --controller {folder}", whole=True)
