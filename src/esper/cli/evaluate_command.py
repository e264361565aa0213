"""`esper evaluate`: compare controllers on paired keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.cli.options import RAY, cluster_at, growth_options, option
from esper.cli.printing import Output, advising, same_command
from esper.leyline import ConfigError
from esper.leyline.constants import MOST_COUNT, MOST_KEY
from esper.leyline.growth_settings import GrowthSettings

if TYPE_CHECKING:
    from esper.proof import EvaluationSettings
    from esper.proof.arms import Run

# By scenario.
ARMS = {
    "scratch": "static,random,scripted:early,heuristic",
    "trained": "heuristic",
    "depth": "depth:auto",
}
EXTRA = {"trained": (0.1, 0.3, 1.0), "depth": (0.75, 1.0)}


# Settings that an evaluation has of its own, or that are for runs with one network.
NOT_FOR_EVALUATIONS = (
    *("steps", "start", "schedule.warmup", "schedule.decay", "cooling", "insured"),
    *("batches_per_epoch", "patience", "max_time", "progress"),
)


@dataclass(frozen=True)
class EvaluateSettings:
    task: str = option("digits", "The task; see `esper tasks`.")
    scenario: str = option(
        "scratch",
        "How hosts start: scratch, trained, or depth (with one block of those that the task has).",
    )
    extra: str | None = option(
        None,
        "With --scenario trained: extra compute budgets, separated by commas, as fractions of the "
        "host's training. Default: 0.1,0.3,1.0. With --scenario depth: compute budgets, as "
        "fractions of training all blocks. Default: 0.75,1.0.",
    )
    arms: str | None = option(
        None,
        "Controllers to compare, separated by commas: static, random, heuristic, scripted:NAME, "
        "pretrained, or the folder of a learned policy. Default: static,random,scripted:early,"
        "heuristic; with --scenario trained heuristic; with --scenario depth depth:auto "
        "(also depth:SHARE).",
    )
    keys: int = option(20, "Paired keys: each arm trains on each.", min=1, max=MOST_COUNT)
    tuning_keys: int | None = option(
        None,
        "Other keys on which arms choose rates and widths. Default: 8.",
        min=1,
        max=1000,
    )
    first_key: int = option(0, "The first key; the others follow.", min=0, max=MOST_KEY)
    steps: int | None = option(None, "Epochs to train. Default: the task's.", min=1, max=MOST_COUNT)
    out: str | None = option(None, "Folder for the results. Default: runs/evaluate-TASK.")
    overwrite: bool = option(False, "Replace an evaluation that is already there.")
    resume: bool = option(False, "Continue an evaluation that was stopped or killed.")
    tune: bool = option(
        False, "Let every arm choose its learning rate from the same grid, on validation."
    )
    controls: bool = option(
        True, "Also train the grown topology from scratch, and static networks of the best width."
    )
    control_for: str | None = option(
        None, "The arm that the controls are matched to. Default: the last one that grows."
    )
    ray: str | None = option(None, RAY)
    growth: Mapping[str, Any] = growth_options(without=NOT_FOR_EVALUATIONS)


def evaluate(output: Output, settings: EvaluateSettings) -> None:
    """Compare controllers on paired keys, on test data, with control networks.

    Prints tables and writes evaluation.json, trials.csv and report.html. Every trained network is
    saved at once: Ctrl-C ends early with the complete keys, and --resume continues, also after a
    kill.

    Examples:

      esper evaluate --task digits --arms static,random,heuristic --keys 20 --tune

      esper evaluate --arms static,heuristic,runs/first --control-for heuristic

      esper evaluate --task digits --scenario trained --extra 0.1,0.3,1.0 --tune

      esper evaluate --task pydocs --scenario depth --tune
    """
    # All input is checked before the first trial.
    from esper.api import find_controller, one_thread
    from esper.growth.devices import find_device
    from esper.observatory.evaluation import evaluation_folder
    from esper.observatory.terminal import PhaseProgress
    from esper.proof import evaluate as run_evaluation
    from esper.tolaria.data.catalogue import data_root
    from esper.tolaria.tasks import find_task

    task, plan = find_task(settings.task), _plan(settings)
    cluster = cluster_at(settings.ray, plan.growth.device)
    find_device(plan.growth.device)
    for arm in plan.arms:
        find_controller(arm)
    data = task.load(data_root())
    out = Path(settings.out or f"runs/evaluate-{settings.task}")

    def on_run(label: str, run: "Run") -> None:
        if not output.progress.is_terminal:
            output.note(run_line(label, run), whole=True)

    with (
        cluster as workers,
        evaluation_folder(out, overwrite=settings.overwrite, resume=settings.resume),
    ):
        with (
            advising(output, f"continue with {same_command('--resume')}"),
            one_thread(),
            PhaseProgress(output.progress) as bar,
        ):
            report = run_evaluation(
                task,
                data,
                plan,
                find_controller,
                bar.show,
                folder=out,
                on_run=on_run,
                workers=workers,
            )
        _conclude(output, out, report.as_dict())


def _conclude(output: Output, out: Path, found: dict[str, Any]) -> None:
    from esper.observatory.evaluation import evaluation_summary, write_evaluation
    from esper.observatory.report import write_report
    from esper.observatory.terminal import print_spaced

    print_spaced(output.result, evaluation_summary(found))
    output.json(found)
    for path in (*write_evaluation(out, found), write_report(out)):
        output.note(str(path), whole=True)
    if len(found["keys"]) < found["keys_wanted"]:
        output.note(f"stopped before the end; continue with {same_command('--resume')}", whole=True)


def _plan(settings: EvaluateSettings) -> "EvaluationSettings":
    from esper.proof import EvaluationSettings

    return EvaluationSettings(
        arms=_arms(settings),
        keys=settings.keys,
        first_key=settings.first_key,
        tuning_keys=settings.tuning_keys,
        steps=settings.steps,
        tune=settings.tune,
        controls=settings.controls,
        control_for=settings.control_for,
        growth=GrowthSettings(population="auto").updated(settings.growth),
        scenario=settings.scenario,
        extra=_extra(settings),
    )


def _arms(settings: EvaluateSettings) -> tuple[str, ...]:
    given = ARMS.get(settings.scenario, "heuristic") if settings.arms is None else settings.arms
    return tuple(arm.strip() for arm in given.split(",") if arm.strip())


def _extra(settings: EvaluateSettings) -> tuple[float, ...]:
    if settings.extra is None:
        return EXTRA.get(settings.scenario, ())
    try:
        return tuple(float(share) for share in settings.extra.split(","))
    except ValueError:
        raise ConfigError(
            f"extra must be numbers separated by commas, such as 0.1,0.3, got {settings.extra!r}"
        ) from None


def run_line(label: str, run: "Run") -> str:
    """One trained network in a line, before its evaluation on test data."""
    outcome = run.outcome
    score = "not measured" if outcome.val_score is None else f"{outcome.val_score:.2f}"
    return (
        f"{label}, key {outcome.key}: validation {score}, {outcome.params:,} parameters, "
        f"{outcome.train_macs / 1e6:,.0f} M multiply-adds, {run.cpu_seconds:.1f} s"
    )
