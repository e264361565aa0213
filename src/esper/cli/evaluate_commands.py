"""`esper evaluate`: what the command does once its words are understood."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from esper.api import find_controller
from esper.observatory.evaluation import (
    arms_table,
    comparisons_table,
    prepare_folder,
    write_evaluation,
)
from esper.observatory.picture import require_matplotlib
from esper.observatory.terminal import PhaseProgress
from esper.proof.evaluation import EvaluationReport, EvaluationSettings, evaluate
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.tasks import find_task


@dataclass(frozen=True)
class EvaluateCommand:
    task: str
    arms: str
    keys: int
    steps: int | None
    out: str
    overwrite: bool
    tune: bool
    controls: bool
    control_for: str | None


def run_evaluate(command: EvaluateCommand) -> None:
    """Everything that can be wrong is found before the first trial; raises EsperError."""
    task = find_task(command.task)
    settings = EvaluationSettings(
        arms=tuple(arm.strip() for arm in command.arms.split(",") if arm.strip()),
        keys=command.keys,
        steps=command.steps,
        tune=command.tune,
        controls=command.controls,
        control_for=command.control_for,
    )
    require_matplotlib()
    for arm in settings.arms:
        find_controller(arm)
    data = task.load(data_root())
    prepare_folder(Path(command.out), overwrite=command.overwrite)
    torch.set_num_threads(1)
    console = Console()
    with PhaseProgress(console) as bar:
        report = evaluate(task, data, settings, find_controller, bar.show)
    show_report(console, report)
    for path in write_evaluation(Path(command.out), report.as_dict()):
        console.print(str(path), highlight=False, soft_wrap=True)


def show_report(console: Console, report: EvaluationReport) -> None:
    rows = report.as_dict()
    console.print()
    console.print(arms_table(rows))
    if report.comparisons:
        console.print()
        console.print(comparisons_table(rows))
    console.print()
    console.print(_in_words(report), highlight=False)


def _in_words(report: EvaluationReport) -> str:
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
