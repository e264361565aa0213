"""`esper grow --start trained`: train a host, then spend a little more on it in every way."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from esper.cli.grow_command import GrowSettings
    from esper.observatory import RunDirectory
    from esper.proof import Plan, Ways
    from esper.tamiyo import Controller
    from esper.tolaria import DataSplits, Task, Trained

HOST, CONTINUE, COOLED, SCRATCH = "trained host", "continue", "cooled", "best scratch"


class Rescue:
    """The arms of one host, each trained with a record of its own."""

    def __init__(
        self, console: "Console", settings: "GrowSettings", task: "Task", data: "DataSplits"
    ) -> None:
        from esper.proof import Ways

        self.console, self.settings, self.task, self.data = console, settings, task, data
        self.began = time.time()
        self.steps = settings.steps or task.steps
        self.ways = Ways(task, data, self.steps, settings.extra)
        self.arms: dict[str, Trained] = {}
        self.others: dict[str, Path] = {}

    def open(self, label: str, folder: Path) -> "RunDirectory":
        from esper.observatory import RunDirectory

        out = str(self.settings.folder)
        config = {**asdict(self.settings), "steps": self.steps, "out": out, "arm": label}
        return RunDirectory.create(
            folder, config, overwrite=self.settings.overwrite, since=self.began, script=True
        )

    def play(self, label: str, plan: "Plan", record: "RunDirectory") -> None:
        from esper.leyline import History
        from esper.observatory import StepProgress
        from esper.proof import train

        with StepProgress(self.console, f"{label:<14}", plan.rules.steps) as progress:
            recorder = History((record, progress))
            (self.arms[label],) = train(
                plan, self.data, [self.settings.key], recorder, attribute=label == "grown"
            )

    def beside(self, label: str, plan: "Plan") -> None:
        from esper.observatory import ARMS

        folder = self.settings.folder / ARMS / label.replace(" ", "-")
        with self.open(label, folder) as record:
            self.play(label, plan, record)
        self.others[label] = folder

    def from_scratch(self) -> "Plan | None":
        """The plan that is best on validation, of all widths and rates."""
        from esper.proof import train

        scores = {}
        with self.console.status("looking for the best network from scratch"):
            for plan in self.ways.from_scratch().values():
                (trained,) = train(plan, self.data, [self.settings.key])
                scores[trained.outcome.val_score or 0.0] = plan
        return scores[max(scores)] if scores else None


def rescue(
    console: "Console",
    settings: "GrowSettings",
    task: "Task",
    data: "DataSplits",
    controller: "Controller",
) -> Rescue:
    """Train the host and every way to go on; Ctrl-C ends it with the arms that are finished."""
    from esper.api import one_thread
    from esper.proof import host_plan

    run = Rescue(console, settings, task, data)
    ways: Ways = run.ways
    with one_thread(), run.open("grown", settings.folder) as record:
        try:
            run.beside(HOST, host_plan(task, run.steps))
            host = run.arms[HOST]
            run.play("grown", ways.going_on(host, controller), record)
            if settings.compare:
                run.beside(CONTINUE, ways.going_on(host, cooling=False))
                run.beside(COOLED, ways.going_on(host))
                best = run.from_scratch()
                if best is not None:
                    run.beside(SCRATCH, best)
        except KeyboardInterrupt:
            if "grown" not in run.arms:
                raise
    return run
