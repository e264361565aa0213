"""`esper grow`: run the arms, compare them on test data, draw the growth."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from rich.console import Console
from torch import nn

from esper.api import find_controller
from esper.growth import default_catalogue
from esper.leyline import EpisodeOutcome, History
from esper.observatory import (
    RunDirectory,
    StepProgress,
    draw_growth,
    summary_table,
    write_summary,
)
from esper.tamiyo import Controller, StaticController
from esper.tolaria import (
    Budget,
    DataSplits,
    Task,
    Topology,
    Trained,
    TrialRules,
    find_task,
    score_on,
    train,
)
from esper.tolaria.data.catalogue import data_root

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


def run(settings: GrowSettings) -> None:
    """Everything that can be wrong is found before the first epoch; raises EsperError."""
    task = find_task(settings.task)
    controller = find_controller(settings.controller, len(task.slots), default_catalogue())
    steps = settings.steps or task.steps
    rules = TrialRules(
        steps,
        cast(Literal["isolated", "joint"], settings.incubation),
        budget=Budget(params=settings.max_params, macs=settings.max_macs),
    )
    data = task.load(data_root())
    torch.set_num_threads(1)
    console = Console()
    out = Path(settings.out)
    config = {**asdict(settings), "steps": steps}

    def arm(label: str, folder: Path, who: Controller, topology: Topology) -> Trained:
        with (
            RunDirectory(folder, {**config, "arm": label}, overwrite=settings.overwrite) as record,
            StepProgress(console, f"{label:<14}", steps) as progress,
        ):
            (trained,) = train(
                task.recipe(data),
                [settings.key],
                replace(rules, topology=topology),
                who,
                task=task.name,
                recorder=History((record, progress)),
            )
            return trained

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
    _conclude(console, task, settings, data, arms, others)


def _conclude(
    console: Console,
    task: Task,
    settings: GrowSettings,
    data: DataSplits,
    arms: dict[str, Trained],
    others: dict[str, Path],
) -> None:
    out = Path(settings.out)
    rows = [
        {
            "arm": label,
            "test_score": score_on(arms[label].model, task, data.test_x, data.test_y),
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
    saved = _save_model(arms["grown"].model, data.val_x[:2], out / MODEL)
    console.print(f"model    {saved}", highlight=False)
    console.print(f"record   {out}", highlight=False, soft_wrap=True)


def _in_words(outcome: EpisodeOutcome) -> str:
    kept = ", ".join(f"{seed.blueprint} at {seed.module}" for seed in outcome.seeds) or "no seed"
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
