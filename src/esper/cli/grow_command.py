"""`esper grow`: run the arms, compare them on test data, draw the growth."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from rich.console import Console
from torch import nn

from esper.api import find_controller
from esper.api.training import check_fit
from esper.growth import LifecycleRules, default_catalogue
from esper.leyline import EpisodeOutcome, History
from esper.observatory import (
    RunDirectory,
    StepProgress,
    draw_growth,
    summary_table,
    write_summary,
)
from esper.tamiyo import Controller, StaticController
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.environment import GrowthEnv
from esper.tolaria.episode import run_episode, settle_outcome
from esper.tolaria.garden import Budget
from esper.tolaria.population import LoopedPopulation
from esper.tolaria.scoring import score_on
from esper.tolaria.tasks import Task, find_task

MODEL = "model.pt2"


@dataclass(frozen=True)
class GrowSettings:
    task: str
    controller: str
    key: int
    steps: int | None
    out: str
    overwrite: bool
    max_params: float | None
    max_macs: float | None
    incubation: str
    compare: bool


@dataclass(frozen=True)
class ArmResult:
    """One trained network: its outcome, and its score on test data."""

    outcome: EpisodeOutcome
    model: nn.Module
    test_score: float
    topology: list[tuple[int, int]]


class Watch:
    """A recorder that moves a progress bar."""

    def __init__(self, progress: StepProgress) -> None:
        self.progress = progress

    def event(self, event: object) -> None:
        pass

    def metrics(self, row: Mapping[str, Any]) -> None:
        self.progress.show(row)

    def outcome(self, outcome: EpisodeOutcome) -> None:
        pass


def run(settings: GrowSettings) -> None:
    """Everything that can be wrong is found before the first epoch; raises EsperError."""
    task = find_task(settings.task)
    controller = find_controller(settings.controller)
    check_fit(controller, len(task.slots), default_catalogue())
    steps = settings.steps or task.steps
    rules = LifecycleRules(
        max_steps=steps,
        incubation=cast(Literal["isolated", "joint"], settings.incubation),
    )
    budget = Budget(params=settings.max_params, macs=settings.max_macs)
    data = task.load(data_root())
    torch.set_num_threads(1)
    console = Console()
    out = Path(settings.out)
    config = {**asdict(settings), "steps": steps}

    def arm(label: str, folder: Path, who: Controller, topology: Sequence[tuple[int, int]]) -> Any:
        with (
            RunDirectory(folder, {**config, "arm": label}, overwrite=settings.overwrite) as record,
            StepProgress(console, f"{label:<14}", steps) as progress,
        ):
            return _run_arm(
                task, data, settings.key, rules, budget, who, topology, record, Watch(progress)
            )

    grown = arm("grown", out, controller, ())
    arms = {"grown": grown}
    others = {}
    if settings.compare and grown.outcome.ended == "finished":
        others["host alone"] = out / "arms" / "host-alone"
        arms["host alone"] = arm("host alone", others["host alone"], StaticController(), ())
        if grown.topology:
            others["from scratch"] = out / "arms" / "from-scratch"
            arms["from scratch"] = arm(
                "from scratch", others["from scratch"], StaticController(), grown.topology
            )
    _conclude(console, task, settings, data.val_x[:2], arms, others)


def _run_arm(
    task: Task,
    data: DataSplits,
    key: int,
    rules: LifecycleRules,
    budget: Budget,
    controller: Controller,
    topology: Sequence[tuple[int, int]],
    *recorders: Any,
) -> ArmResult:
    population = LoopedPopulation(task.recipe(data, default_catalogue()), [key])
    env = GrowthEnv(
        population,
        rules,
        budget=budget,
        on_panic="continue",
        random_guess_loss=task.random_guess_loss,
        recorder=History(recorders),
        keep_best=True,
    )
    ended = run_episode(env, controller, topology=topology)
    outcome = settle_outcome(env, 0, task=task.name, controller=controller.name, ended=ended)
    held = env.table.holds_seed[0].nonzero()[0].tolist()
    model = population.export(0)
    return ArmResult(
        outcome,
        model,
        test_score=score_on(model, task, data.test_x, data.test_y),
        topology=[(slot, int(env.table.blueprint[0, slot])) for slot in held],
    )


def _conclude(
    console: Console,
    task: Task,
    settings: GrowSettings,
    example: torch.Tensor,
    arms: dict[str, ArmResult],
    others: dict[str, Path],
) -> None:
    out = Path(settings.out)
    rows = [
        {
            "arm": label,
            "test_score": arms[label].test_score,
            "val_score": arms[label].outcome.val_score,
            "params": arms[label].outcome.params,
            "macs": arms[label].outcome.macs,
            "train_macs": arms[label].outcome.train_macs,
        }
        for label in ("host alone", "grown", "from scratch")
        if label in arms
    ]
    write_summary(out, rows)
    console.print()
    console.print(summary_table(rows, task.score.__name__))
    outcome = arms["grown"].outcome
    console.print(f"\n{_in_words(outcome)}", highlight=False)
    if outcome.steps > 0 and outcome.best_step >= 0:
        title = f"{task.name}, {outcome.controller}, key {settings.key}"
        console.print(f"picture  {draw_growth(out, title, others)}", highlight=False)
    saved = _save_model(arms["grown"].model, example, out / MODEL)
    console.print(f"model    {saved}", highlight=False)
    console.print(f"record   {out}", highlight=False, soft_wrap=True)


def _in_words(outcome: EpisodeOutcome) -> str:
    kept = ", ".join(f"{seed.blueprint} in {seed.slot_id}" for seed in outcome.seeds) or "no seed"
    early = "Interrupted; " if outcome.ended == "interrupted" else ""
    return (
        f"{early}{outcome.germinated} seeds germinated, {outcome.culled} culled; "
        f"the network of epoch {outcome.best_step} is kept, with {kept}."
    )


def _save_model(model: nn.Module, example: torch.Tensor, path: Path) -> Path:
    """The whole network as a torch.export program, for any batch size; needs no Esper to run."""
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model.eval(), (example,), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    return path
