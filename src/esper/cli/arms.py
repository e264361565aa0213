"""The arms of one `esper grow`: networks that are compared, each with its own record."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.cli.grow_command import GrowSettings
    from esper.cli.printing import Output
    from esper.leyline import Recorder
    from esper.leyline.growth_settings import GrowthSettings
    from esper.observatory.run_directory import RunDirectory
    from esper.proof.arms import Plan
    from esper.proof.scenarios import RescuePlans
    from esper.tamiyo.situation import Controller
    from esper.tolaria.data.splits import DataSplits
    from esper.tolaria.engine.run import Trained
    from esper.trackers import Tracker


GROWN = "grown"


class Arms:
    """Trains the arms: the grown one in the folder of the run, the others in folders inside it. In
    a `with` block the folder is locked and trackers are open.

    trained   the networks by label
    others    the folders of all but the grown one, by label
    """

    def __init__(
        self,
        output: "Output",
        settings: "GrowSettings",
        data: "DataSplits",
        growth: "GrowthSettings",
        began: float,
    ) -> None:
        self.output, self.settings, self.data = output, settings, data
        self.growth, self.began = growth, began
        self.trained: dict[str, Trained] = {}
        self.others: dict[str, Path] = {}
        self.trackers: dict[str, Tracker] = {}

    def __enter__(self) -> "Arms":
        self.record = self._open(GROWN, self.settings.folder)
        return self

    def __exit__(self, *exception: object) -> None:
        for tracker in self.trackers.values():
            tracker.close()
        self.record.close()

    def _open(self, label: str, folder: Path) -> "RunDirectory":
        """The record in a folder, locked; a new one unless the run is resumed."""
        from esper.observatory.run_directory import RunDirectory

        if self.settings.resume and RunDirectory.is_run(folder):
            return RunDirectory(folder, script=True)
        return RunDirectory.create(
            folder,
            self.config(label),
            overwrite=self.settings.overwrite,
            since=self.began,
            script=True,
        )

    def config(self, label: str) -> dict[str, Any]:
        """The settings of an arm, for its record."""
        own = asdict(self.settings)
        del own["growth"], own["resume"]
        return {**own, **self.growth.flat(), "out": str(self.settings.folder), "arm": label}

    def play(self, label: str, plan: "Plan") -> "Trained":
        """Train an arm, or continue its training."""
        from esper.api.growth_run import GrowthRun, open_folder
        from esper.observatory.run_directory import ARMS
        from esper.observatory.terminal import StepProgress
        from esper.tolaria.engine.run import play_run

        plan = self._here(plan)
        recipe = replace(plan.task.recipe(self.data), weights=plan.weights)
        folder, record = self.settings.folder, self.record
        if label != GROWN:
            folder = folder / ARMS / label.replace(" ", "-")
            record = self._open(label, folder)
            self.others[label] = folder
        with ExitStack() as stack:
            if record is not self.record:
                stack.enter_context(record)
            bar = StepProgress(self.output.progress, f"{label:<14}", plan.rules.steps or 0)
            run = GrowthRun(
                plan.rules,
                self.config(label),
                recipe.data,
                open_record=partial(open_folder, folder, resume=self.settings.resume, held=record),
                listeners=(stack.enter_context(bar), *self._track(label)),
            )
            (self.trained[label],) = play_run(
                recipe,
                [self.settings.key],
                plan.rules,
                plan.controller,
                run.history,
                task=plan.task.name,
                attribute=True,
                session=run,
            )
        return self.trained[label]

    def _here(self, plan: "Plan") -> "Plan":
        """The plan, on the device of the command."""
        return replace(plan, rules=replace(plan.rules, device=self.growth.device))

    def _track(self, label: str) -> "Sequence[Recorder]":
        if self.settings.track is None:
            return ()
        from esper.api.callbacks import Caller
        from esper.cli.options import open_tracker

        config = self.config(label)
        tracker = open_tracker(self.settings.track, self.settings.folder, label, config)
        self.trackers[label] = tracker
        return (Caller([tracker]),)

    def conclude(self, rows: "Sequence[Mapping[str, Any]]") -> None:
        """Write the scores on test data, from the rows of the summary, to trackers."""
        from esper.trackers import outcome_scalars

        for row in rows:
            if row["arm"] in self.trackers:
                outcome = self.trained[row["arm"]].outcome
                scalars = outcome_scalars({**vars(outcome), "test_score": row["test_score"]})
                self.trackers[row["arm"]].scalars(scalars, outcome.steps)

    def forget_unfinished(self) -> None:
        """Leave out the arm that Ctrl-C has ended."""
        for label in [x for x, t in self.trained.items() if t.outcome.ended == "interrupted"]:
            del self.trained[label]
            self.others.pop(label, None)

    def best_of(self, label: str, plans: "Sequence[Plan]") -> "Plan":
        """The plan with the best validation score."""
        from esper.proof.arms import train

        tried: list[Trained] = []
        with self.output.progress.status(f"searching the {label} of {len(plans)}"):
            for plan in plans:
                tried += train(self._here(plan), self.data, [self.settings.key])
        scores = [-math.inf if t.outcome.val_score is None else t.outcome.val_score for t in tried]
        return plans[max(range(len(plans)), key=scores.__getitem__)]


HOST, CONTINUE, COOLED, SCRATCH = "trained host", "continue", "cooled", "best scratch"


def rescue(arms: "Arms", plans: "RescuePlans", controller: "Controller") -> bool:
    """Train the host and every arm; False after Ctrl-C, when only the finished arms are kept."""
    from esper.proof.arms import host_plan

    try:
        host = _finished(arms.play(HOST, host_plan(plans.task, plans.steps)))
        plan = plans.continued(host, controller)
        _finished(arms.play(GROWN, replace(plan, rules=_as_asked(arms, plan))))
        if arms.settings.compare:
            _finished(arms.play(CONTINUE, plans.continued(host, cooling=False)))
            _finished(arms.play(COOLED, plans.continued(host)))
            scratch = plans.from_scratch()
            if scratch:
                _finished(arms.play(SCRATCH, arms.best_of(SCRATCH, scratch)))
    except KeyboardInterrupt:
        arms.forget_unfinished()
        if GROWN not in arms.trained:
            raise
        return False
    return True


def _as_asked(arms: "Arms", plan: "Plan") -> "GrowthSettings":
    """The settings of the command, with the compute budget and the learning-rate schedule of the
    plan, which are the same for all arms."""
    rules = plan.rules
    return replace(
        arms.growth,
        steps=rules.steps,
        schedule=rules.schedule,
        max_train_macs=rules.max_train_macs,
        extra=rules.extra,
    )


def _finished(trained: "Trained") -> "Trained":
    """Raises KeyboardInterrupt for an arm that Ctrl-C has ended."""
    if trained.outcome.ended == "interrupted":
        raise KeyboardInterrupt
    return trained
