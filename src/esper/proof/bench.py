"""Choices that arms make for themselves, on validation data of tuning keys.

Every arm, control arms included, has the same grid of learning rates and the same tuning keys.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from esper.leyline.growth_settings import GrowthSettings
from esper.proof.arms import Plan, Run
from esper.proof.compute import of_width
from esper.proof.jobs import Job, run_jobs
from esper.proof.record import Record
from esper.proof.work import WorkerPool
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks import Task


@dataclass(frozen=True)
class Arm:
    """An arm, or a candidate for one.

    width, shape  of its host, if it has another one than the task
    extra         its extra budget, in the scenario trained
    control_of    label of the arm that it is a control of
    versus        label of the arm that it is compared with
    """

    name: str
    plan: Plan
    width: int | None = None
    shape: tuple[int, ...] | None = None
    extra: float | None = None
    control_of: str | None = None
    versus: str | None = None

    @property
    def label(self) -> str:
        return labelled(self.name, self.extra)

    @property
    def learning_rate(self) -> float:
        return self.plan.task.learning_rate

    @property
    def tuning_label(self) -> str:
        words = [f"tuning {self.label}"]
        if self.width is not None:
            words.append(f"width {self.width}")
        if self.shape is not None:
            words.append(f"shape {'-'.join(map(str, self.shape))}")
        return ", ".join([*words, f"rate {self.learning_rate:.2g}"])


def labelled(name: str, extra: float | None) -> str:
    """The name of an arm with its extra budget."""
    return name if extra is None else f"{name} +{extra:g}"


@dataclass
class Bench:
    """What all arms share. `rates` is the grid of learning rates, `widths` has the tasks with hosts
    of other widths, and `runs` the runs of each tuning key by label."""

    task: Task
    data: DataSplits
    steps: int
    population: PopulationKind
    growth: GrowthSettings
    tuning_keys: tuple[int, ...]
    rates: tuple[float, ...]
    record: Record
    workers: WorkerPool
    progress: Callable[[str, int, int], None]
    widths: dict[int, Task] = field(init=False)
    runs: list[dict[str, Run]] = field(init=False)

    def __post_init__(self) -> None:
        # Made once: two tasks of the same width would not be equal.
        self.widths = {width: of_width(self.task, width) for width in self.task.widths}
        self.runs = [{} for _ in self.tuning_keys]

    def candidates(self, name: str, plan: Plan, **what: Any) -> list[Arm]:
        """An arm for every learning rate; `what` are further fields of it."""
        return [Arm(name, plan.with_rate(rate), **what) for rate in self.rates]

    def choose(self, groups: Sequence[Sequence[Arm]]) -> list[Arm]:
        """The best candidate of each group on validation; a single one is not trained."""
        tried = [arm for group in groups if len(group) > 1 for arm in group]
        trained = self._train({arm.tuning_label: arm.plan for arm in tried})
        scores = {label: _mean_validation(runs) for label, runs in trained.items()}
        return [max(each, key=lambda arm: scores.get(arm.tuning_label, 0.0)) for each in groups]

    def train(self, arm: Arm, tuning_label: str, *, keep: bool = False) -> list[Run]:
        """The runs of an arm on the tuning keys, from now on also for plans that name the arm."""
        runs = self._train({tuning_label: arm.plan}, keep=keep)[tuning_label]
        for own, run in zip(self.runs, runs, strict=True):
            own[arm.label] = run
        return runs

    def _train(self, plans: Mapping[str, Plan], keep: bool = False) -> dict[str, list[Run]]:
        jobs = [
            Job(label, plan, self.data, self.tuning_keys, self.runs, keep=keep)
            for label, plan in plans.items()
        ]
        labels, each = list(plans), len(self.tuning_keys)

        def on_start(job: Job) -> None:
            self.progress(job.label, each * labels.index(job.label), each * len(labels))

        return dict(zip(labels, run_jobs(jobs, self.record, self.workers, on_start), strict=True))


def _mean_validation(runs: Sequence[Run]) -> float:
    """The mean validation score; -inf if a network was never measured."""
    scores = [run.outcome.val_score for run in runs]
    return fmean(-math.inf if score is None else score for score in scores)
