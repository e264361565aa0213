"""`esper grow`: run the arms, compare them on test data, draw the growth."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from esper.cli.options import option

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from esper.growth import LifecycleRules
    from esper.leyline import EpisodeOutcome, Recorder
    from esper.tamiyo import Controller
    from esper.tolaria.data.splits import DataSplits
    from esper.tolaria.garden import Budget
    from esper.tolaria.tasks import Task

Topology = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class GrowSettings:
    task: str = option("digits", "What to learn; see `esper tasks`.")
    controller: str = option(
        "heuristic",
        "Who decides: heuristic, random, static (never grow), scripted:FILE, "
        "where FILE may be the actions.txt of an earlier run, or the folder of a training run.",
    )
    key: int = option(0, "Same key, same run, byte for byte.", min=0)
    steps: int | None = option(None, "Epochs to train; each task has its default.", min=1)
    out: str | None = option(
        None, "Folder for the record of the run. Default: runs/TASK-CONTROLLER-KEY."
    )
    overwrite: bool = option(False, "Replace a run that is already there.")
    max_params: float | None = option(
        None, "Most parameters, as a multiple of the host's, such as 1.5."
    )
    max_macs: float | None = option(None, "Most multiply-adds, as a multiple of the host's.")
    incubation: str = option(
        "isolated",
        "isolated: a seed learns without acting before it is blended in; "
        "joint: it is blended in from birth.",
    )
    compare: bool = option(True, "Also train the host alone, and the grown topology from scratch.")

    @property
    def folder(self) -> Path:
        who = self.controller.split("/")[-1].replace(":", "-")
        return Path(self.out or f"runs/{self.task}-{who}-{self.key}")


@dataclass(frozen=True)
class Arm:
    """One trained network: its outcome, its score on test data, and the seeds it ended with."""

    outcome: "EpisodeOutcome"
    model: "nn.Module"
    test_score: float
    topology: list[tuple[int, int]]


def grow(settings: GrowSettings) -> None:
    """Train a task's network and let it grow.

    Ends with a table of what the growth was worth on test data, and a picture of it. Ctrl-C ends
    the run early; what was reached until then is saved.

    Examples:

      esper grow --task digits

      esper grow --task pydocs --controller random --key 3

      esper grow --controller scripted:runs/first/actions.txt
    """
    # Everything that can be wrong is found before the first epoch.
    import torch
    from rich.console import Console

    from esper.api import find_controller
    from esper.api.training import check_fit
    from esper.growth import LifecycleRules, default_catalogue
    from esper.observatory import RunDirectory, StepProgress
    from esper.observatory.run_directory import ARMS
    from esper.tamiyo import StaticController
    from esper.tolaria.data.catalogue import data_root
    from esper.tolaria.garden import Budget
    from esper.tolaria.tasks import find_task

    task = find_task(settings.task)
    controller = find_controller(settings.controller)
    check_fit(controller, len(task.slots), default_catalogue())
    steps, out = settings.steps or task.steps, settings.folder
    rules = LifecycleRules(
        max_steps=steps, incubation=cast(Literal["isolated", "joint"], settings.incubation)
    )
    budget = Budget(params=settings.max_params, macs=settings.max_macs)
    data = task.load(data_root())
    torch.set_num_threads(1)
    console = Console()

    def open_record(label: str, folder: Path) -> RunDirectory:
        config = {**asdict(settings), "steps": steps, "out": str(out), "arm": label}
        return RunDirectory.create(folder, config, overwrite=settings.overwrite, script=True)

    def play(label: str, record: RunDirectory, who: "Controller", topology: Topology = ()) -> Arm:
        with StepProgress(console, f"{label:<14}", steps) as progress:
            listeners = (record, progress)
            return _train(task, data, settings.key, rules, budget, who, topology, listeners)

    # The folder is locked to the end, so that nobody takes it from under the comparison.
    with open_record("grown", out) as record:
        arms = {"grown": play("grown", record, controller)}
        others = {}
        if settings.compare and arms["grown"].outcome.ended == "finished":
            others["host alone"] = out / ARMS / "host-alone"
            if arms["grown"].topology:
                others["from scratch"] = out / ARMS / "from-scratch"
        for label, folder in others.items():
            topology = arms["grown"].topology if label == "from scratch" else ()
            with open_record(label, folder) as beside:
                arms[label] = play(label, beside, StaticController(), topology)
        _conclude(console, task, settings, data.val_x[:2], arms, others)


def _train(
    task: "Task",
    data: "DataSplits",
    key: int,
    rules: "LifecycleRules",
    budget: "Budget",
    controller: "Controller",
    topology: Topology,
    listeners: "Sequence[Recorder]",
) -> Arm:
    from esper.growth import default_catalogue
    from esper.leyline import History
    from esper.tolaria.environment import GrowthEnv
    from esper.tolaria.episode import run_episode, settle_outcome
    from esper.tolaria.population import LoopedPopulation
    from esper.tolaria.scoring import score_on

    population = LoopedPopulation(task.recipe(data, default_catalogue()), [key])
    env = GrowthEnv(
        population,
        rules,
        budget=budget,
        on_panic="continue",
        random_guess_loss=task.random_guess_loss,
        recorder=History(listeners),
        keep_best=True,
    )
    ended = run_episode(env, controller, topology=topology)
    outcome = settle_outcome(env, 0, task=task.name, controller=controller.name, ended=ended)
    held = env.table.holds_seed[0].nonzero()[0].tolist()
    model = population.export(0)
    return Arm(
        outcome,
        model,
        test_score=score_on(model, task, data.test_x, data.test_y),
        topology=[(slot, int(env.table.blueprint[0, slot])) for slot in held],
    )


def _conclude(
    console: "Console",
    task: "Task",
    settings: GrowSettings,
    example: "Tensor",
    arms: Mapping[str, Arm],
    others: dict[str, Path],
) -> None:
    from esper.observatory import draw_growth, say, seeds_table, summary_table, write_summary
    from esper.observatory.run_directory import MODEL

    out, score = settings.folder, task.score.__name__
    labels = [label for label in ("host alone", "grown", "from scratch") if label in arms]
    rows = [_summary(label, arms[label]) for label in labels]
    write_summary(out, rows)
    outcome, seeds = arms["grown"].outcome, rows[labels.index("grown")]["seeds"]
    console.print()
    console.print(summary_table(rows, score))
    if seeds:
        console.print()
        console.print(seeds_table(seeds, score))
    console.print()
    say(console, _in_words(outcome, seeds))
    if outcome.steps > 0 and outcome.best_step >= 0:
        title = f"{task.name}, {outcome.controller}, key {settings.key}"
        say(console, f"picture  {draw_growth(out, title, others)}", whole=True)
    say(console, f"model    {_save_model(arms['grown'].model, example, out / MODEL)}", whole=True)
    say(console, f"record   {out}", whole=True)


def _summary(label: str, arm: Arm) -> dict[str, Any]:
    """A row of summary.json."""
    outcome = arm.outcome
    return {
        "arm": label,
        "test_score": arm.test_score,
        "val_score": outcome.val_score,
        "params": outcome.params,
        "macs": outcome.macs,
        "train_macs": outcome.train_macs,
        "seeds": [_seed(asdict(seed)) for seed in outcome.seeds],
    }


def _seed(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "blueprint": report["blueprint"],
        "module": report.get("module", report["slot_id"]),
        "slot_id": report["slot_id"],
        "params": report["params"],
        "contribution": report["counterfactual_contribution"],
    }


def _in_words(outcome: "EpisodeOutcome", seeds: Sequence[Mapping[str, Any]]) -> str:
    from esper.observatory import place

    kept = ", ".join(f"{seed['blueprint']} in {place(seed)}" for seed in seeds) or "no seed"
    early = "Interrupted; " if outcome.ended == "interrupted" else ""
    return (
        f"{early}{outcome.germinated} seed{'' if outcome.germinated == 1 else 's'} germinated, "
        f"{outcome.culled} culled; the network of epoch {outcome.best_step} is kept, with {kept}."
    )


def _save_model(model: "nn.Module", example: "Tensor", path: Path) -> Path:
    """The whole network as a torch.export program, for any batch size; needs no Esper to run."""
    import torch

    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model.eval(), (example,), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    return path
