"""`esper grow`: train the arms, compare them on test data, draw the growth."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.cli.arms import CONTINUE, COOLED, HOST, SCRATCH, Arms, rescue
from esper.cli.options import BATCH, SLOTS, TRACK, check_track, growth_options, option
from esper.cli.printing import Output, advising, same_command
from esper.leyline import ConfigError
from esper.leyline.constants import MOST_COUNT, MOST_KEY
from esper.leyline.growth_settings import GrowthSettings
from esper.leyline.settings import read_toml

if TYPE_CHECKING:
    from torch import Tensor, nn

    from esper.leyline.depth import Depth
    from esper.tamiyo.situation import Controller
    from esper.tolaria.tasks import Task


EXTRA = 0.3


@dataclass(frozen=True)
class GrowSettings:
    task: str = option("digits", "The task; see `esper tasks`.")
    controller: str = option(
        "heuristic",
        "What decides: heuristic, random, static (never grow), heuristic:FILE.toml (with the "
        "settings of that file), scripted:FILE (such as the actions.txt of an earlier run), "
        "pretrained (see `esper policies`), or the folder of a training run or policy.",
    )
    key: int = option(0, "Random seed: the same key gives the same run.", min=0, max=MOST_KEY)
    out: str | None = option(
        None, "Folder for the record of the run. Default: runs/TASK-CONTROLLER-KEY."
    )
    overwrite: bool = option(False, "Replace a run that is already there.")
    resume: bool = option(False, "Continue a run of the same command that was stopped or killed.")
    extra: float | None = option(
        None,
        "With --start trained: compute to spend, as a fraction of the host's training. "
        f"Default: {EXTRA}.",
    )
    compare: bool = option(True, "Also train the host alone, and the grown topology from scratch.")
    slots: str | None = option(None, SLOTS)
    depth: bool = option(
        False,
        "Start with one block of the network and add the others while it trains; the controller "
        "is depth:auto, or depth:SHARE for one growth after this share of the run.",
    )
    batch: int | None = option(None, BATCH, min=1, max=MOST_COUNT)
    settings: str | None = option(None, "TOML file with growth settings; flags override it.")
    track: str | None = option(None, TRACK)
    growth: Mapping[str, Any] = growth_options(without=("insured", "progress", "population"))

    @property
    def folder(self) -> Path:
        controller = self.controller.split("/")[-1].replace(":", "-")
        return Path(self.out or f"runs/{self.task}-{controller}-{self.key}")


def grow(output: Output, settings: GrowSettings) -> None:
    """Train a task's network and let it grow.

    Prints a table of what the growth gained on test data, and draws a picture of it. Ctrl-C ends
    the run early and saves the best network so far.

    Examples:

      esper grow --task digits

      esper grow --task pydocs --controller random --key 3

      esper grow --controller scripted:runs/first/actions.txt

      esper grow --task digits --start trained --extra 0.3

      esper grow --task pydocs --depth
    """
    began = time.time()
    # All input is checked before the first epoch.
    from esper.api.callbacks import check_script, find_controller
    from esper.api.growth_warnings import warn_if_out_of_domain
    from esper.api.training import one_thread
    from esper.growth.blueprints.catalogue import default_catalogue
    from esper.growth.depth import BLOCKS
    from esper.observatory.report import write_report
    from esper.proof.scenarios import RescuePlans
    from esper.tolaria.data.catalogue import data_root
    from esper.tolaria.engine.run import make_env
    from esper.tolaria.tasks import find_task

    if settings.resume and settings.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one of them")
    task = find_task(settings.task).adjusted(settings.slots, settings.batch)
    task = replace(task, depth=_depth(settings))
    catalogue = default_catalogue() if task.depth is None else BLOCKS
    controller = find_controller(settings.controller, len(task.slots), catalogue, task.depth)
    given = {} if settings.settings is None else read_toml(Path(settings.settings))
    growth = GrowthSettings(task.steps, schedule=task.schedule)
    growth = growth.updated({**given, **settings.growth})
    if growth.batches_per_epoch is not None:
        task = replace(task, batches_per_epoch=growth.batches_per_epoch)
    settings = replace(settings, extra=_extra(settings.extra, growth.trained))
    check_track(settings.track)
    data = task.load(data_root())
    fresh = replace(growth, start="fresh")
    check_script(controller, make_env(task.recipe(data), [0], fresh).population.template)
    warn_if_out_of_domain(controller, task.name, growth.start)
    steps = growth.steps or task.steps
    plans = None if settings.extra is None else RescuePlans(task, data, steps, settings.extra)
    go_on = f"continue with {same_command('--resume')}"
    with one_thread(), Arms(output, settings, data, growth, began) as arms:
        with advising(output, go_on):
            if plans is not None:
                complete = rescue(arms, plans, controller)
            else:
                complete = _grow_fresh(arms, task, controller)
        _conclude(arms, task)
    # After the lock is released, or the report would say that the run is still running.
    output.note(f"report   {write_report(settings.folder)}", whole=True)
    if not complete:
        output.note(f"stopped before the end; {go_on}", whole=True)


def _grow_fresh(arms: Arms, task: "Task", controller: "Controller") -> bool:
    """Train the arms; False if Ctrl-C has ended one of them."""
    from esper.proof.arms import Plan
    from esper.tamiyo.controllers.simple import StaticController

    growth, static = arms.growth, StaticController()
    grown = arms.play("grown", Plan(task, controller, growth))
    if arms.settings.compare and grown.outcome.ended == "finished":
        arms.play("host alone", Plan(task, static, growth))
        if task.depth is not None:
            arms.play("all blocks", Plan(replace(task, depth=None), static, growth))
        elif grown.topology:
            found = replace(growth, topology=grown.topology)
            arms.play("from scratch", Plan(task, static, found))
    return all(each.outcome.ended != "interrupted" for each in arms.trained.values())


def _depth(settings: GrowSettings) -> "Depth | None":
    """Raises ConfigError for options that exclude growth in depth."""
    if not settings.depth:
        if settings.controller.partition(":")[0] == "depth":
            raise ConfigError(f"--controller {settings.controller} is for --depth; give both")
        return None
    from esper.tamiyo.controllers.depth import depth_named

    if settings.slots is not None:
        raise ConfigError("--depth grows the list of blocks; leave out --slots")
    if settings.growth.get("start") == "trained":
        raise ConfigError(
            "--depth starts with fewer blocks than the network has, so it is for new "
            "networks; leave out --start trained"
        )
    named = settings.controller.partition(":")[0] == "depth"
    return depth_named(settings.controller if named else "auto")


def _extra(extra: float | None, trained: bool) -> float | None:
    """The extra compute of a trained host; None for a fresh one."""
    if not trained and extra is not None:
        raise ConfigError("--extra is for trained hosts; leave it out, or give --start trained")
    if extra is None:
        return EXTRA if trained else None
    if not 0.0 < extra <= 100.0:
        raise ConfigError(
            f"extra must be a fraction of the host's training above 0, such as 0.3; got {extra}"
        )
    return extra


def _conclude(arms: "Arms", task: "Task") -> None:
    from esper.observatory.picture import draw_growth
    from esper.observatory.run_directory import MODEL, write_summary
    from esper.observatory.terminal import growth_summary, print_spaced
    from esper.tolaria.engine.objectives import named

    output, settings, data = arms.output, arms.settings, arms.data
    trained, others = arms.trained, arms.others
    out, score = settings.folder, named(task.score).__name__
    order = (
        *(HOST, CONTINUE, COOLED, "host alone", "grown"),
        *("from scratch", "all blocks", SCRATCH),
    )
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
    print_spaced(output.result, growth_summary(rows, asdict(outcome), seeds, score))
    output.json({"out": str(out), "arms": rows})
    if outcome.steps > 0 and outcome.best_step >= 0:
        title = f"{task.name}, {outcome.controller}, key {settings.key}"
        output.note(f"picture  {draw_growth(out, title, others)}", whole=True)
    saved = _save_model(trained["grown"].model, data.val_x[:2], out / MODEL)
    output.note(f"model    {saved}", whole=True)
    output.note(f"record   {out}", whole=True)


def _save_model(model: "nn.Module", example: "Tensor", path: Path) -> Path:
    """Save the network as a torch.export program for any batch size, which needs no Esper."""
    import torch

    batch = torch.export.Dim("batch", min=1)
    # On the CPU, so that every machine can load it.
    program = torch.export.export(model.cpu().eval(), (example,), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    return path
