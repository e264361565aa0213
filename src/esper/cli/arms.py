"""The arms of one `esper grow`, each trained with a record of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.cli.printing import without_printing

if TYPE_CHECKING:
    from rich.console import Console

    from esper.cli.grow_command import GrowSettings
    from esper.leyline import Recorder
    from esper.observatory.run_directory import RunDirectory
    from esper.proof import Plan
    from esper.tolaria.data.splits import DataSplits
    from esper.tolaria.engine.environment import GrowthEnv
    from esper.tolaria.engine.run import Trained
    from esper.trackers import Tracker


class Arms:
    """`trained` are the networks by label, `others` the folders of those beside the grown one. The
    run has begun at `began`, and trains for `steps` epochs after the first. Trackers are open until
    the end of the `with`, for what is found out last."""

    def __init__(
        self,
        console: "Console",
        settings: "GrowSettings",
        data: "DataSplits",
        steps: int,
        began: float,
    ) -> None:
        self.console, self.settings, self.data = console, settings, data
        self.steps, self.began = steps, began
        self.trained: dict[str, Trained] = {}
        self.others: dict[str, Path] = {}
        self.trackers: dict[str, Tracker] = {}

    def __enter__(self) -> "Arms":
        return self

    def __exit__(self, *exception: object) -> None:
        for tracker in self.trackers.values():
            tracker.close()

    def open(self, label: str, folder: Path) -> "RunDirectory":
        from esper.observatory.run_directory import RunDirectory

        return RunDirectory.create(
            folder,
            self.config(label),
            overwrite=self.settings.overwrite,
            since=self.began,
            script=True,
        )

    def config(self, label: str) -> dict[str, Any]:
        out = str(self.settings.folder)
        return {**without_printing(self.settings), "steps": self.steps, "out": out, "arm": label}

    def track(self, label: str) -> "Sequence[Recorder]":
        """Who is to be told of an arm besides its record."""
        if self.settings.track is None:
            return ()
        from esper.api import Caller
        from esper.cli.tracking import open_tracker

        config = self.config(label)
        tracker = open_tracker(self.settings.track, self.settings.folder, label, config)
        self.trackers[label] = tracker
        return (Caller([tracker]),)

    def conclude(self, rows: "Sequence[Mapping[str, Any]]") -> None:
        """Tell trackers what came of the arms: rows of the summary, with scores on test data."""
        from esper.trackers import outcome_scalars

        for row in rows:
            if row["arm"] in self.trackers:
                outcome = self.trained[row["arm"]].outcome
                told = outcome_scalars({**vars(outcome), "test_score": row["test_score"]})
                self.trackers[row["arm"]].scalars(told, outcome.steps)

    def play(self, label: str, plan: "Plan", record: "RunDirectory") -> "Trained":
        from esper.api import Watch
        from esper.leyline import History
        from esper.observatory.terminal import StepProgress
        from esper.tolaria.engine.run import train

        recipe = replace(plan.task.recipe(self.data), weights=plan.weights)
        with StepProgress(self.console, f"{label:<14}", plan.rules.steps) as progress:
            history = History((record, progress, *self.track(label)))

            def watch(env: "GrowthEnv") -> None:
                look = Watch(history, env, plan.controller, recipe.data)
                history.listeners = (*history.listeners, look)

            (self.trained[label],) = train(
                recipe,
                [self.settings.key],
                plan.rules,
                plan.controller,
                task=plan.task.name,
                recorder=history,
                ready=watch,
            )
        return self.trained[label]

    def beside(self, label: str, plan: "Plan") -> "Trained":
        from esper.observatory.run_directory import ARMS

        folder = self.settings.folder / ARMS / label.replace(" ", "-")
        with self.open(label, folder) as record:
            trained = self.play(label, plan, record)
        self.others[label] = folder
        return trained

    def forget_unfinished(self) -> None:
        """Arms that Ctrl-C has ended are not shown."""
        for label in [x for x, t in self.trained.items() if t.outcome.ended == "interrupted"]:
            del self.trained[label]
            self.others.pop(label, None)

    def best_of(self, label: str, plans: "Sequence[Plan]") -> "Plan":
        """The plan that is best on validation."""
        from esper.proof import train

        tried: list[Trained] = []
        with self.console.status(f"looking for the {label} of {len(plans)}"):
            for plan in plans:
                tried += train(plan, self.data, [self.settings.key])
        # A network that was never measured is worth nothing.
        scores = [-math.inf if t.outcome.val_score is None else t.outcome.val_score for t in tried]
        return plans[max(range(len(plans)), key=scores.__getitem__)]
