"""`esper grow`: run the arms, compare them on test data, draw the growth."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from esper.cli.arms import Arms
from esper.cli.options import option
from esper.cli.printing import AS_JSON, QUIET, consoles, print_json
from esper.cli.rescue import CONTINUE, COOLED, HOST, SCRATCH, rescue
from esper.cli.tracking import TRACK, check_track
from esper.leyline import ConfigError
from esper.leyline.constants import MOST_COUNT, MOST_KEY

if TYPE_CHECKING:
    from torch import Tensor, nn

    from esper.tamiyo.situation import Controller
    from esper.tolaria.engine.recipe import Precision
    from esper.tolaria.engine.run import TrialRules
    from esper.tolaria.tasks.base import Task


@dataclass(frozen=True)
class GrowSettings:
    task: str = option("digits", "What to learn; see `esper tasks`.")
    controller: str = option(
        "heuristic",
        "Who decides: heuristic, random, static (never grow), "
        "heuristic:FILE.toml (with the settings of that file), "
        "scripted:FILE, where FILE may be the actions.txt of an earlier run, "
        "pretrained (see `esper policies`), or the folder of a training run or policy.",
    )
    key: int = option(0, "Same key, same run, byte for byte.", min=0, max=MOST_KEY)
    steps: int | None = option(
        None,
        "Epochs to train after the first, one decision before each; each task has its default.",
        min=1,
        max=MOST_COUNT,
    )
    out: str | None = option(
        None, "Folder for the record of the run. Default: runs/TASK-CONTROLLER-KEY."
    )
    overwrite: bool = option(False, "Replace a run that is already there.")
    max_params: float | None = option(
        None, "Most parameters: a multiple of the host's, such as 1.5, or a number above 100."
    )
    max_macs: float | None = option(None, "Most multiply-adds per example, likewise.")
    incubation: str | None = option(
        None,
        "isolated: a seed learns without acting before it is blended in; "
        "joint: it acts in full from birth, when it changes nothing yet. "
        "Default: isolated, and joint with --start trained.",
    )
    precision: str = option("fp32", "In what the networks compute while they train: fp32 or bf16.")
    start: str = option(
        "fresh",
        "fresh: with a new network; trained: with one that is trained to its end first, which is "
        "then grown for --extra more.",
    )
    extra: float = option(
        0.3, "With --start trained: what more may be spent, as a share of the host's training."
    )
    compare: bool = option(True, "Also train the host alone, and the grown topology from scratch.")
    track: str | None = option(None, TRACK)
    quiet: bool = option(False, QUIET)
    json: bool = option(False, AS_JSON)

    @property
    def folder(self) -> Path:
        who = self.controller.split("/")[-1].replace(":", "-")
        return Path(self.out or f"runs/{self.task}-{who}-{self.key}")


def grow(settings: GrowSettings) -> None:
    """Train a task's network and let it grow.

    Ends with a table of what the growth was worth on test data, and a picture of it. Ctrl-C ends
    the run early; what was reached until then is saved.

    Examples:

      esper grow --task digits

      esper grow --task pydocs --controller random --key 3

      esper grow --controller scripted:runs/first/actions.txt

      esper grow --task digits --start trained --extra 0.3
    """
    began = time.time()
    # Everything that can be wrong is found before the first epoch.
    from esper.api import check_script, find_controller, warn_of_other_ground
    from esper.growth.blueprints.catalogue import default_catalogue
    from esper.observatory.report import write_report
    from esper.observatory.terminal import say
    from esper.tolaria.data.catalogue import data_root
    from esper.tolaria.engine.garden import Budget
    from esper.tolaria.engine.run import RESCUE, TrialRules, make_env
    from esper.tolaria.tasks import find_task

    task = replace(find_task(settings.task), precision=cast("Precision", settings.precision))
    controller = find_controller(settings.controller, len(task.slots), default_catalogue())
    steps, out = settings.steps or task.steps, settings.folder
    _check_start(settings)
    check_track(settings.track)
    usual = RESCUE.incubation if settings.start == "trained" else TrialRules.incubation
    incubation = usual if settings.incubation is None else settings.incubation
    rules = TrialRules(
        steps,
        cast(Literal["isolated", "joint"], incubation),
        budget=Budget(params=settings.max_params, macs=settings.max_macs),
        schedule=task.schedule,
    )
    data = task.load(data_root())
    recipe, (console, _) = task.recipe(data), consoles(settings.quiet, settings.json)
    check_script(controller, make_env(recipe, [settings.key], rules).population.template)
    start: Literal["fresh", "trained"] = "trained" if settings.start == "trained" else "fresh"
    warn_of_other_ground(controller, task.name, start)
    with Arms(console, settings, data, steps, began) as arms:
        if settings.start == "trained":
            rescue(arms, task, controller, rules)
            _conclude(arms, task)
        else:
            _grow_fresh(arms, task, controller, rules)
    # Once the folder is free: a report of a run that is still locked says that it is running.
    say(console, f"report   {write_report(out)}", whole=True)


def _grow_fresh(arms: Arms, task: "Task", controller: "Controller", rules: "TrialRules") -> None:
    from esper.api import one_thread
    from esper.proof.arms import Plan
    from esper.tamiyo.controllers.static import StaticController

    settings = arms.settings
    # The folder is locked to the end, so that nobody takes it from under the comparison.
    with one_thread(), arms.open("grown", settings.folder) as record:
        grown = arms.play("grown", Plan(task, controller, rules), record)
        static = StaticController()
        if settings.compare and grown.outcome.ended == "finished":
            arms.beside("host alone", Plan(task, static, rules))
            if grown.topology:
                found = replace(rules, topology=grown.topology)
                arms.beside("from scratch", Plan(task, static, found))
        _conclude(arms, task)


def _check_start(settings: GrowSettings) -> None:
    if settings.start not in ("fresh", "trained"):
        raise ConfigError(f"start must be fresh or trained, got {settings.start!r}")
    if not 0.0 < settings.extra <= 100.0:
        raise ConfigError(
            "extra must be a share of the host's training above 0, such as 0.3; got "
            f"{settings.extra}"
        )


def _conclude(arms: "Arms", task: "Task") -> None:
    from esper.observatory.picture import draw_growth
    from esper.observatory.run_directory import MODEL, write_summary
    from esper.observatory.terminal import growth_in_words, say, seeds_table, summary_table

    console, settings, data = arms.console, arms.settings, arms.data
    trained, others = arms.trained, arms.others
    out, score = settings.folder, task.score.__name__
    order = (HOST, CONTINUE, COOLED, "host alone", "grown", "from scratch", SCRATCH)
    labels = [label for label in order if label in trained]
    rows = [
        trained[label].outcome.summary(
            label, task.score_on(trained[label].model, data.test_x, data.test_y)
        )
        for label in labels
    ]
    write_summary(out, rows)
    arms.conclude(rows)
    outcome, seeds = trained["grown"].outcome, rows[labels.index("grown")]["seeds"]
    console.print()
    _, result = consoles(settings.quiet, settings.json)
    result.print(summary_table(rows, score))
    if seeds:
        result.print()
        result.print(seeds_table(seeds, score))
    result.print()
    say(result, growth_in_words(asdict(outcome), seeds))
    if settings.json:
        print_json({"out": str(out), "arms": rows})
    if outcome.steps > 0 and outcome.best_step >= 0:
        title = f"{task.name}, {outcome.controller}, key {settings.key}"
        say(console, f"picture  {draw_growth(out, title, others)}", whole=True)
    saved = _save_model(trained["grown"].model, data.val_x[:2], out / MODEL)
    say(console, f"model    {saved}", whole=True)
    say(console, f"record   {out}", whole=True)


def _save_model(model: "nn.Module", example: "Tensor", path: Path) -> Path:
    """The whole network as a torch.export program, for any batch size; needs no Esper to run."""
    import torch

    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model.eval(), (example,), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    return path
