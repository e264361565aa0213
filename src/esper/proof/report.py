"""What an evaluation found: trials, means of arms, and comparisons."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from esper.proof.choices import Arm
from esper.proof.settings import STATIC, EvaluationSettings
from esper.proof.statistics import holm, mean_interval, paired_difference
from esper.proof.work import Run
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import Precision
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks.base import Task


@dataclass(frozen=True)
class Trial:
    """One arm on one key. Scores in the task's unit; costs are multiply-adds.

    `train_macs` is the whole training: rejected seeds, validation and counterfactuals included.
    `kept` names the seeds of the network that was tested, `seeds` says what each is worth (in the
    unit of the validation score), `attribution_macs` what it cost to find that out.
    """

    arm: str
    key: int
    test_score: float
    val_score: float | None
    params: int
    macs: int
    train_macs: int
    cpu_seconds: float
    steps: int
    germinated: int
    fossilized: int
    culled: int
    rollbacks: int
    attribution_macs: int
    kept: str
    seeds: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Comparison:
    """Paired difference of test scores, `arm` minus `versus`; p also adjusted after Holm."""

    arm: str
    versus: str
    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None


@dataclass(frozen=True)
class EvaluationReport:
    """Everything that an evaluation found and how it was done; `as_dict` is ready for JSON.

    `arms_wanted` are those that were asked for; `crossover` says in a sentence up to which extra
    budget the arm `reference` is ahead.
    """

    task: str
    score: str
    scenario: str
    extra: tuple[float, ...]
    arms_wanted: tuple[str, ...]
    steps: int
    keys: tuple[int, ...]
    keys_wanted: int
    tuning_keys: tuple[int, ...]
    learning_rates: tuple[float, ...]
    reference: str | None
    population: PopulationKind
    precision: Precision
    arms: tuple[dict[str, Any], ...]
    comparisons: tuple[Comparison, ...]
    trials: tuple[Trial, ...]
    crossover: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def trial_of(task: Task, data: DataSplits, arm: str, run: Run) -> Trial:
    outcome = run.outcome
    assert run.model is not None, "networks of evaluation keys are kept"
    return Trial(
        arm=arm,
        key=outcome.key,
        test_score=task.score_on(run.model, data.test_x, data.test_y),
        val_score=outcome.val_score,
        params=outcome.params,
        macs=outcome.macs,
        train_macs=outcome.train_macs,
        cpu_seconds=run.cpu_seconds,
        steps=outcome.steps,
        germinated=outcome.germinated,
        fossilized=outcome.fossilized,
        culled=outcome.culled,
        rollbacks=outcome.rollbacks,
        attribution_macs=outcome.attribution_macs,
        kept=" ".join(f"{seed.blueprint}@{seed.module}" for seed in outcome.seeds),
        seeds=tuple(seed.worth() for seed in outcome.seeds),
    )


AVERAGED = (
    "test_score", "val_score", "params", "macs", "train_macs", "cpu_seconds", "steps",
    "germinated", "fossilized", "culled", "rollbacks", "attribution_macs",
)  # fmt: skip


def summary(arm: Arm, trials: Sequence[Trial]) -> dict[str, Any]:
    """Means over keys, the interval of the test score, and what the arm chose."""
    own = [trial for trial in trials if trial.arm == arm.label]
    means = {}
    for name in AVERAGED:
        values = [getattr(t, name) for t in own if getattr(t, name) is not None]
        means[name] = sum(values) / len(values) if values else None
    low, high = mean_interval([trial.test_score for trial in own])
    return {
        "arm": arm.label,
        "name": arm.name,
        "extra": arm.extra,
        "control_of": arm.control_of,
        "learning_rate": arm.learning_rate,
        "width": arm.width,
        "shape": arm.shape,
        "test_low": low,
        "test_high": high,
        **means,
    }


def compare(
    arms: Sequence[Arm], trials: Sequence[Trial], settings: EvaluationSettings
) -> tuple[Comparison, ...]:
    """Each arm against the one that does not grow (or the first), and the reference against its
    controls."""
    scores = {arm.label: [t.test_score for t in trials if t.arm == arm.label] for arm in arms}
    if settings.scenario == "scratch":
        baseline = STATIC if STATIC in settings.arms else settings.arms[0]
        pairs = [(name, baseline) for name in settings.arms if name != baseline]
    else:
        pairs = [(arm.label, arm.versus) for arm in arms if arm.versus is not None]
    pairs += [(arm.control_of, arm.label) for arm in arms if arm.control_of is not None]
    found = [paired_difference(scores[one], scores[other]) for one, other in pairs]
    adjusted = holm([difference.p for difference in found])
    return tuple(
        Comparison(one, other, d.n, d.mean, d.low, d.high, d.p, p_holm)
        for (one, other), d, p_holm in zip(pairs, found, adjusted, strict=True)
    )
