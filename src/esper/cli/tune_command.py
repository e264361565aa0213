"""`esper tune`: search settings of the heuristic or of the training of a policy."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.cli.options import option
from esper.cli.printing import AS_JSON, QUIET, consoles, print_json
from esper.cli.rehearsal import DRY_RUN, measuring, show_estimate
from esper.leyline import ConfigError
from esper.leyline.constants import MOST_COUNT, MOST_KEY

if TYPE_CHECKING:
    from rich.console import Console

    from esper.tuning import Plan
    from esper.tuning.plan import Base


@dataclass(frozen=True)
class TuneSettings:
    what: str = option("heuristic", "What is tuned: heuristic, or ppo, the training of a policy.")
    task: str | None = option(None, "What the hosts learn; see `esper tasks`. Default: digits.")
    trials: int | None = option(
        None, "Settings to try, those it starts from included; default 50.", min=1, max=MOST_COUNT
    )
    settings: str | None = option(
        None, "Which to search, with commas; docs/tuning.md lists them. Default: all of them."
    )
    key: int | None = option(None, "Same key, same search; default 0.", min=0, max=MOST_KEY)
    prune: bool = option(True, "Give up trials that are worse than most at the same point.")
    keys: int | None = option(
        None, "Of the heuristic: hosts that each trial is played on; default 8.", min=1, max=1000
    )
    steps: int | None = option(
        None, "Epochs of a host; each task has its default.", min=1, max=MOST_COUNT
    )
    max_params: float | None = option(
        None, "Of the heuristic: most parameters, as in `esper grow`."
    )
    max_macs: float | None = option(None, "Of the heuristic: most multiply-adds, likewise.")
    rounds: int | None = option(
        None, "Of ppo: rounds of each trial; default 20.", min=1, max=MOST_COUNT
    )
    envs: int | None = option(
        None, "Of ppo: host trainings per round; default 16.", min=1, max=MOST_COUNT
    )
    config: str | None = option(
        None,
        "TOML file with the settings to start from: one of `esper train ppo`, or a best.toml of "
        "the heuristic.",
    )
    workers: int | None = option(None, "Of ppo: processes for the hosts; default 1.", min=1)
    out: str | None = option(None, "Folder for the search. Default: runs/tune-WHAT-TASK-KEY.")
    overwrite: bool = option(False, "Replace a run that is already there.")
    resume: str | None = option(
        None, "Go on with the search in this folder instead, with more --trials if given."
    )
    dry_run: bool = option(False, DRY_RUN)
    quiet: bool = option(False, QUIET)
    json: bool = option(False, AS_JSON)


ROUNDS = 20  # of a training that is one trial of many
OF_PPO = ("rounds", "envs", "workers")
# What may be given with --resume.
GOES_ON = ("trials", "workers", "resume", "dry_run", "quiet", "json")


def tune(settings: TuneSettings) -> None:
    """Search good settings of the heuristic or of `train ppo`, with Optuna.

    Every trial is judged on validation data and is on disk at once: Ctrl-C ends early with what
    was found, and --resume goes on, also after a kill. The best settings are in best.toml.

    Examples:

      esper tune --task digits --trials 50 --out runs/tuned

      esper grow --controller heuristic:runs/tuned/best.toml

      esper tune --what ppo --trials 20 --rounds 30 --settings ppo.learning_rate,ppo.entropy_coef
    """
    # Everything that can be wrong is found before the first trial.
    from esper import tuning
    from esper.observatory import METRICS, PhaseProgress, read_trials, say

    if settings.resume is None:
        plan, base = _plan(settings)
        out = Path(settings.out or f"runs/tune-{plan.what}-{plan.task}-{plan.key}")
    else:
        _refuse_changes(settings)
        out = Path(settings.resume)
        plan, base = tuning.plan_of(out, settings.trials), None
    if settings.dry_run:
        _estimate(settings, plan, base, out)
        return
    console, result = consoles(settings.quiet, settings.json)
    with PhaseProgress(console) as bar:

        def on_report(trial: int, reports: int) -> None:
            bar.show(f"trial {trial + 1} of {plan.trials}, {reports} reports", trial, plan.trials)

        def on_trial(row: Mapping[str, Any]) -> None:
            if not console.is_terminal:
                say(console, trial_line(row), whole=True)

        how: dict[str, Any] = {
            "workers": settings.workers,
            "hearing": tuning.Hearing(on_report, on_trial),
        }
        try:
            if settings.resume is None:
                tuning.tune(plan, out, base, overwrite=settings.overwrite, **how)
            else:
                tuning.resume(out, trials=settings.trials, **how)
        except KeyboardInterrupt:
            if not (out / METRICS).is_file():
                raise
    _conclude(console, result, settings, plan, out, read_trials(out))


def _plan(settings: TuneSettings) -> "tuple[Plan, Base]":
    from esper.simic.training import load_config
    from esper.tamiyo import HeuristicConfig
    from esper.tuning import Plan

    names = tuple(n.strip() for n in (settings.settings or "").split(",") if n.strip())
    given = {f.name: getattr(settings, f.name) for f in fields(Plan) if f.name != "settings"}
    given = {name: value for name, value in given.items() if value is not None}
    if settings.what != "ppo":
        plan = Plan(**given, settings=names)
        for name in OF_PPO:
            if getattr(settings, name) is not None:
                raise ConfigError(f"--{name} is of a training; give --what ppo as well")
        file = settings.config
        return plan, HeuristicConfig() if file is None else HeuristicConfig.load(file)
    flags = {name: getattr(settings, name) for name in ("task", "key", "steps", "rounds", "envs")}
    if settings.config is None and settings.rounds is None:
        flags["rounds"] = ROUNDS
    base = load_config(settings.config, flags)
    # What a training has itself is in its base.
    own = {name: value for name, value in given.items() if name != "steps"}
    own |= {"task": base.task, "key": base.key}
    return Plan(**own, settings=names), base


def _refuse_changes(settings: TuneSettings) -> None:
    changed = [
        f.name
        for f in fields(settings)
        if f.name not in GOES_ON and getattr(settings, f.name) != f.default
    ]
    if changed:
        raise ConfigError(
            f"--resume goes on with the settings of the search; leave out {', '.join(changed)}"
        )


def _estimate(settings: TuneSettings, plan: "Plan", base: "Base | None", out: Path) -> None:
    from esper.cli.dry_run import tune_estimate
    from esper.observatory import BASE, check_free, read_trials
    from esper.tuning.plan import load_base

    done = 0
    if base is None:
        base, done = load_base(plan, out / BASE), len(read_trials(out))
    else:
        check_free(out, overwrite=settings.overwrite)
    with measuring(settings.quiet, settings.json):
        estimate = tune_estimate(plan, base, out, max(0, plan.trials - done), settings.workers)
    show_estimate(estimate, quiet=settings.quiet, as_json=settings.json)


def trial_line(row: Mapping[str, Any]) -> str:
    from esper.observatory import shown

    return (
        f"trial {row['round'] + 1}: {row['state']}, validation {shown(row['val_score'], '.2f')}, "
        f"{shown(row['params'], ',.0f')} parameters"
    )


def _conclude(
    console: "Console",
    result: "Console",
    settings: TuneSettings,
    plan: "Plan",
    out: Path,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    from esper.observatory import BEST, best_trial, say, show_trials

    show_trials(result, rows)
    found, file = best_trial(rows), shlex.quote(str(out / BEST))
    if settings.json:
        count = {"trials": len(rows), "trials_wanted": plan.trials}
        where = None if found is None else str(out / BEST)
        print_json({"out": str(out), **count, "start": rows[0] if rows else None, "best": found,
                    "settings": where})  # fmt: skip
    if len(rows) < plan.trials:
        folder = shlex.quote(str(out))
        say(console, f"go on with esper tune --resume {folder}", whole=True)
    elif found is None:
        say(console, "no trial was measured to its end, so there is nothing to use", whole=True)
    elif plan.what == "ppo":
        say(console, f"use it with esper train ppo --config {file} --rounds 200", whole=True)
    else:
        arms = f"heuristic,heuristic:{out / BEST}"
        arms = shlex.quote(arms)
        say(console, f"use it with esper grow --controller heuristic:{file}", whole=True)
        say(console, f"test it with esper evaluate --task {plan.task} --arms {arms}", whole=True)
