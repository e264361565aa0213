"""`esper evaluate`: compare controllers on paired keys."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from esper.cli.options import option
from esper.leyline.constants import MOST_COUNT

if TYPE_CHECKING:
    from rich.console import Console

    from esper.proof import EvaluationReport, Run
    from esper.tolaria import Precision


@dataclass(frozen=True)
class EvaluateSettings:
    task: str = option("digits", "What to learn; see `esper tasks`.")
    arms: str = option(
        "static,random,scripted:early,heuristic",
        "Who is compared, with commas: static, random, heuristic, heuristic:trial, "
        "scripted:NAME, "
        "or the run directory of a learned policy.",
    )
    keys: int = option(20, "Paired keys: each arm trains on each.", min=1, max=MOST_COUNT)
    steps: int | None = option(
        None, "Epochs to train; each task has its default.", min=1, max=MOST_COUNT
    )
    out: str | None = option(None, "Folder for the results. Default: runs/evaluate-TASK.")
    overwrite: bool = option(False, "Replace an evaluation that is already there.")
    resume: bool = option(False, "Go on with an evaluation that was stopped or killed.")
    tune: bool = option(
        False, "Let every arm choose its learning rate, from one grid, on validation."
    )
    controls: bool = option(
        True, "Also train static networks: what was grown, from scratch, and the best width."
    )
    control_for: str | None = option(
        None, "The arm that the controls are made for. Default: the last that grows."
    )
    population: str = option("auto", "How hosts are trained: looped, fused, auto or measure.")
    precision: str = option("fp32", "In what hosts compute while they train: fp32 or bf16.")


def evaluate(settings: EvaluateSettings) -> None:
    """Compare controllers on paired keys, on test data, and with honest controls.

    Prints tables and writes evaluation.json, trials.csv and evaluation.png. Every network that is
    trained is on disk at once: Ctrl-C ends early with the keys that are complete, and --resume
    goes on, also after a kill.

    Examples:

      esper evaluate --task digits --arms static,random,heuristic --keys 20 --tune

      esper evaluate --arms static,heuristic,runs/first --control-for heuristic
    """
    # Everything that can be wrong is found before the first trial.
    from rich.console import Console

    from esper.api import find_controller, one_thread
    from esper.observatory import (
        PhaseProgress,
        evaluation_folder,
        require_matplotlib,
        say,
        write_evaluation,
        write_report,
    )
    from esper.proof import EvaluationSettings
    from esper.proof import evaluate as run_evaluation
    from esper.tolaria import data_root, find_task

    task = find_task(settings.task)
    plan = EvaluationSettings(
        arms=tuple(arm.strip() for arm in settings.arms.split(",") if arm.strip()),
        keys=settings.keys,
        steps=settings.steps,
        tune=settings.tune,
        controls=settings.controls,
        control_for=settings.control_for,
        population=settings.population,
        precision=cast("Precision", settings.precision),
    )
    require_matplotlib()
    for arm in plan.arms:
        find_controller(arm)
    data = task.load(data_root())
    out = Path(settings.out or f"runs/evaluate-{settings.task}")
    console = Console()

    def tell(label: str, run: "Run") -> None:
        if not console.is_terminal:
            say(console, run_line(label, run), whole=True)

    with evaluation_folder(out, overwrite=settings.overwrite, resume=settings.resume):
        with one_thread(), PhaseProgress(console) as bar:
            report = run_evaluation(
                task, data, plan, find_controller, bar.show, folder=out, tell=tell
            )
        show_report(console, report)
        for path in (*write_evaluation(out, report.as_dict()), write_report(out)):
            say(console, str(path), whole=True)


def run_line(label: str, run: "Run") -> str:
    """One trained network in a line. Nobody has looked at test data yet."""
    outcome = run.outcome
    score = "not measured" if outcome.val_score is None else f"{outcome.val_score:.2f}"
    return (
        f"{label}, key {outcome.key}: validation {score}, {outcome.params:,} parameters, "
        f"{outcome.train_macs / 1e6:,.0f} M multiply-adds, {run.cpu_seconds:.1f} s"
    )


def show_report(console: "Console", report: "EvaluationReport") -> None:
    from esper.observatory import arms_table, comparisons_table, say, seeds_worth_table

    rows = report.as_dict()
    console.print()
    console.print(arms_table(rows))
    others = [comparisons_table(rows) if report.comparisons else None, seeds_worth_table(rows)]
    for table in others:
        if table is not None:
            console.print()
            console.print(table)
    console.print()
    say(console, _in_words(report))


def _in_words(report: "EvaluationReport") -> str:
    words = [
        f"{len(report.keys)} paired keys, {report.steps} epochs."
        if len(report.keys) == report.keys_wanted
        else f"Interrupted: {len(report.keys)} of {report.keys_wanted} keys are complete."
    ]
    if len(report.learning_rates) > 1:
        rates = ", ".join(f"{rate:.2g}" for rate in report.learning_rates)
        words.append(f"Each arm chose its learning rate from {rates} on validation.")
    else:
        words.append(f"All arms used the learning rate {report.learning_rates[0]:.2g}.")
    if report.reference is not None:
        words.append(f"The controls are made for {report.reference}.")
        widths = [f"{arm['arm']} has width {arm['width']}" for arm in report.arms if arm["width"]]
        if widths:
            words.append(f"Of the host's family, {' and '.join(widths)}.")
        else:
            words.append("The task has no family of hosts, so there is no best-static.")
    return " ".join(words)
