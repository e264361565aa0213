"""Evaluation: all arms on paired keys, with controls that make the comparison fair.

What an arm may choose (its learning rate, the width of the best static network) it chooses on
validation data of tuning keys. Then every arm is trained on every evaluation key. Only then is
the test part read, once for each network.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.proof.arms import first_situation
from esper.proof.choices import Arm, Bench, choose_arms
from esper.proof.record import Record, Run, Tell
from esper.proof.statistics import holm, paired_difference, require_scipy
from esper.tamiyo import Controller
from esper.tolaria import (
    DataSplits,
    PopulationKind,
    Precision,
    Task,
    check_population,
    check_precision,
    choose_population,
)

# With 3 keys the choice follows noise: on digits they prefer a third of the host's learning rate,
# with 5 and with 8 they do not, on validation alone.
TUNING_KEYS = 8
FIRST_TUNING_KEY = 1_000_000  # so that they never meet evaluation keys, which count from 0
RATE_FACTORS = (1.0, 1 / 3, 3.0)
STATIC = "static"
# Keys of an arm at a time; Ctrl-C loses those that are under way.
SIDE_BY_SIDE: dict[PopulationKind, int] = {"looped": 1, "fused": 32}

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EvaluationSettings:
    """What is compared.

    arms         static, random, heuristic, scripted:NAME or a run directory of a learned policy
    keys        how many evaluation keys, from 0
    steps        epochs of every arm; None: the task's
    tune         every arm chooses its learning rate from the same grid, on tuning keys
    controls     add the control arms, made for the arm `control_for`
    control_for  None: the last of the arms that is not `static`
    population   how networks are trained, as `choose_population` takes it
    precision    in what they compute while they are trained; they are tested in fp32
    """

    arms: tuple[str, ...]
    keys: int = 20
    steps: int | None = None
    tune: bool = False
    controls: bool = True
    control_for: str | None = None
    population: str = "auto"
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        check_population(self.population)
        check_precision(self.precision)
        if not self.arms:
            raise ConfigError("an evaluation needs at least one arm, such as static or heuristic")
        twice = [arm for arm in self.arms if self.arms.count(arm) > 1]
        if twice:
            raise ConfigError(f"arm {twice[0]!r} is listed more than once")
        if not 1 <= self.keys < FIRST_TUNING_KEY:
            raise ConfigError(
                f"keys must lie between 1 and {FIRST_TUNING_KEY - 1}, got {self.keys}"
            )
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        if self.control_for is not None and self.control_for not in self.arms:
            raise ConfigError(
                f"controls cannot be made for {self.control_for!r}, which is not among the arms "
                f"{', '.join(self.arms)}"
            )

    @property
    def reference(self) -> str | None:
        """The arm that the controls are made for; None without controls."""
        growing = [arm for arm in self.arms if arm != STATIC]
        if not self.controls or not (self.control_for or growing):
            return None
        return self.control_for or growing[-1]


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
    """Everything that an evaluation found and how it was done; `as_dict` is ready for JSON."""

    task: str
    score: str
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    task: Task,
    data: DataSplits,
    settings: EvaluationSettings,
    make_arm: Callable[[str], Controller],
    progress: Progress = lambda phase, done, total: None,
    *,
    folder: Path | None = None,
    tell: Tell = lambda label, run: None,
) -> EvaluationReport:
    """Run the arms and compare them. `make_arm` turns the name of an arm into its controller.

    Bad input raises EsperError before anything is trained beyond one epoch. After Ctrl-C the keys
    that are complete are reported; KeyboardInterrupt is raised if there is none.

    Whatever was trained is kept in `folder` at once. If one was begun there, with the same
    settings, it goes on and ends with the numbers that it would have had. `tell` is told of every
    network that is trained, by what it was trained for.
    """
    require_scipy()
    controllers = {name: make_arm(name) for name in settings.arms}
    task = replace(task, precision=settings.precision)
    _rehearse(task, data, controllers)
    record = Record(folder, {"task": task.name, **asdict(settings)}, tell)
    population = record.once(
        "population",
        lambda: choose_population(task.recipe(data), settings.keys, settings.population),
    )
    steps = settings.steps or task.steps
    bench = Bench(
        task,
        data,
        steps,
        population,
        tuning_keys=tuple(range(FIRST_TUNING_KEY, FIRST_TUNING_KEY + TUNING_KEYS)),
        rates=tuple(f * task.learning_rate for f in RATE_FACTORS[: None if settings.tune else 1]),
        record=record,
        progress=progress,
    )
    arms = choose_arms(bench, controllers, settings.reference)
    trained = list(_train_all(bench, arms, settings.keys))
    trials = [_trial(task, data, arm, run) for runs in trained for arm, run in runs.items()]
    return EvaluationReport(
        task=task.name,
        score=task.score.__name__,
        steps=steps,
        keys=tuple(range(len(trained))),
        keys_wanted=settings.keys,
        tuning_keys=bench.tuning_keys if bench.tuned_anything else (),
        learning_rates=bench.rates,
        reference=settings.reference,
        population=population,
        precision=settings.precision,
        arms=tuple(_summary(arm, trials) for arm in arms),
        comparisons=_compare(arms, trials, settings),
        trials=tuple(trials),
    )


def _rehearse(task: Task, data: DataSplits, controllers: dict[str, Controller]) -> None:
    """Let every controller decide once, so that one that does not fit the task is found now."""
    situation = first_situation(task, data)
    for controller in controllers.values():
        controller.reset(situation.n_envs)
        controller.act(situation)


def _train_all(bench: Bench, arms: Sequence[Arm], keys: int) -> Iterator[dict[str, Run]]:
    """For each key its trained arms; blocks of keys are the outer loop, so that every result is a
    pair, also after Ctrl-C."""
    total, at_a_time = keys * len(arms), SIDE_BY_SIDE[bench.population]
    for first in range(0, keys, at_a_time):
        block = range(first, min(first + at_a_time, keys))
        runs: list[dict[str, Run]] = [{} for _ in block]
        try:
            for i, arm in enumerate(arms):
                bench.progress(arm.name, first * len(arms) + i * len(block), total)
                plans = [arm.plan(before) for before in runs]
                grows = plans[0].rules.counterfactuals
                trained = bench.record.train(
                    arm.name, plans, bench.data, block, attribute=grows, keep=True
                )
                for of_key, run in zip(runs, trained, strict=True):
                    of_key[arm.name] = run
        except KeyboardInterrupt:
            if first == 0:
                raise
            return
        yield from runs
    bench.progress("done", total, total)


def _trial(task: Task, data: DataSplits, arm: str, run: Run) -> Trial:
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


def _summary(arm: Arm, trials: Sequence[Trial]) -> dict[str, Any]:
    """Means over keys, and what the arm chose."""
    own = [trial for trial in trials if trial.arm == arm.name]
    means = {}
    for name in AVERAGED:
        values = [getattr(t, name) for t in own if getattr(t, name) is not None]
        means[name] = sum(values) / len(values) if values else None
    return {
        "arm": arm.name,
        "control_of": arm.control_of,
        "learning_rate": arm.learning_rate,
        "width": arm.width,
        **means,
    }


def _compare(
    arms: Sequence[Arm], trials: Sequence[Trial], settings: EvaluationSettings
) -> tuple[Comparison, ...]:
    """Each arm against `static` (or the first arm), and the reference against its controls."""
    scores = {arm.name: [t.test_score for t in trials if t.arm == arm.name] for arm in arms}
    baseline = STATIC if STATIC in settings.arms else settings.arms[0]
    pairs = [(name, baseline) for name in settings.arms if name != baseline]
    pairs += [(arm.control_of, arm.name) for arm in arms if arm.control_of is not None]
    found = [paired_difference(scores[one], scores[other]) for one, other in pairs]
    adjusted = holm([difference.p for difference in found])
    return tuple(
        Comparison(one, other, d.n, d.mean, d.low, d.high, d.p, p_holm)
        for (one, other), d, p_holm in zip(pairs, found, adjusted, strict=True)
    )
