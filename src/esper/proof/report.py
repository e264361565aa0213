"""The report of an evaluation: results, means of arms, comparisons, and the crossover."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from esper.proof.arms import Run
from esper.proof.scenarios import BEST_SCRATCH, CONTINUE_COOLED, Arm, labelled
from esper.proof.settings import STATIC, EvaluationSettings
from esper.proof.statistics import holm, mean_interval, paired_difference
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.recipe import Precision
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks import Task

# Arms that the reference is compared with for the crossover.
RIVALS = (CONTINUE_COOLED, BEST_SCRATCH)


@dataclass(frozen=True)
class ArmResult:
    """One arm on one key. Scores are in the task's unit, costs in multiply-adds.

    `train_macs` is the whole training, with removed seeds, validation and counterfactuals. `kept`
    names the seeds of the tested network; `seeds` says what each is worth, in the unit of the
    validation score; `attribution_macs` is the cost of measuring that.
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
    """Results of an evaluation, and its settings; `as_dict` is ready for JSON.

    `arms_wanted` are the arms that were asked for, without controls. `crossover` says in a sentence
    at which extra budgets the arm `reference` is ahead.
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
    trials: tuple[ArmResult, ...]
    crossover: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


AVERAGED = (
    "test_score", "val_score", "params", "macs", "train_macs", "cpu_seconds", "steps",
    "germinated", "fossilized", "culled", "rollbacks", "attribution_macs",
)  # fmt: skip


def result_of(task: Task, data: DataSplits, arm: str, run: Run) -> ArmResult:
    assert run.model is not None, "networks of evaluation keys are kept"
    own = {"test_score", "cpu_seconds"}
    return ArmResult(
        arm=arm,
        key=run.outcome.key,
        test_score=task.score_on(run.model, data.test_x, data.test_y),
        cpu_seconds=run.cpu_seconds,
        kept=" ".join(f"{seed.blueprint}@{seed.module}" for seed in run.outcome.seeds),
        seeds=tuple(seed.summary() for seed in run.outcome.seeds),
        **{name: getattr(run.outcome, name) for name in AVERAGED if name not in own},
    )


def summary(arm: Arm, results: Sequence[ArmResult]) -> dict[str, Any]:
    """Means over keys, the interval of the test score, and what the arm chose."""
    own = [result for result in results if result.arm == arm.label]
    means = {}
    for name in AVERAGED:
        values = [getattr(each, name) for each in own if getattr(each, name) is not None]
        means[name] = sum(values) / len(values) if values else None
    low, high = mean_interval([result.test_score for result in own])
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
    arms: Sequence[Arm], results: Sequence[ArmResult], settings: EvaluationSettings
) -> tuple[Comparison, ...]:
    """Each arm with the one that does not grow (or the first), and the reference with its
    controls."""
    scores = {arm.label: [r.test_score for r in results if r.arm == arm.label] for arm in arms}
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


def crossover(
    arms: Sequence[Mapping[str, Any]], reference: str | None, extras: Sequence[float]
) -> str | None:
    """A sentence, from the means of the arms, that says at which extra budgets the reference is
    ahead of the better of its rivals; None without a reference or rivals."""
    scores = {arm["arm"]: arm["test_score"] for arm in arms}
    differences = {}
    for extra in extras:
        rivals = [scores.get(labelled(name, extra)) for name in RIVALS]
        known = [score for score in rivals if score is not None]
        if reference is None or not known:
            return None
        differences[extra] = scores[labelled(reference, extra)] - max(known)
    if not differences:
        return None
    ahead = [f"{extra:g}" for extra, difference in differences.items() if difference > 0.0]
    where = f"at extra budgets {' and '.join(ahead)}" if ahead else "at no extra budget"
    values = ", ".join(
        f"{difference:+.2f} at {extra:g}" for extra, difference in differences.items()
    )
    rival = " and ".join(name for name in RIVALS if labelled(name, extras[0]) in scores)
    against = f"against the better of {rival}" if " and " in rival else f"against {rival}"
    return f"{reference} is ahead {where} ({against}: {values})."
