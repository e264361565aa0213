"""Evaluation: all arms on paired keys, with controls that make the comparison fair.

What an arm may choose (its learning rate, the width of the best static network) it chooses on
validation data of tuning keys. Then every arm is trained on every evaluation key. Only then is
the test part read, once for each network.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from esper.proof.arms import first_situation
from esper.proof.choices import Arm, Bench, choose_arms
from esper.proof.crossover import crossover
from esper.proof.record import Record, Tell
from esper.proof.report import EvaluationReport, compare, summary, trial_of
from esper.proof.scenarios import choose_scenario
from esper.proof.settings import FIRST_TUNING_KEY, EvaluationSettings
from esper.proof.statistics import require_scipy
from esper.proof.work import Alone, Crew, Job, Run, carry_out
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.fused.choice import PopulationKind, choose_population
from esper.tolaria.tasks.base import Task

# With 3 keys the choice follows noise: on digits they prefer a third of the host's learning rate,
# with 5 and with 8 they do not, on validation alone.
TUNING_KEYS = 8
RATE_FACTORS = (1.0, 1 / 3, 3.0)
# Keys of an arm at a time; Ctrl-C loses those that are under way.
SIDE_BY_SIDE: dict[PopulationKind, int] = {"looped": 1, "fused": 32}

Progress = Callable[[str, int, int], None]


def evaluate(
    task: Task,
    data: DataSplits,
    settings: EvaluationSettings,
    make_arm: Callable[[str], Controller],
    progress: Progress = lambda phase, done, total: None,
    *,
    folder: Path | None = None,
    tell: Tell = lambda label, run: None,
    crew: Crew | None = None,
) -> EvaluationReport:
    """Run the arms and compare them. `make_arm` turns the name of an arm into its controller.

    Bad input raises EsperError before anything is trained beyond one epoch. After Ctrl-C the keys
    that are complete are reported; KeyboardInterrupt is raised if there is none.

    Whatever was trained is kept in `folder` at once. If one was begun there, with the same
    settings, it goes on and ends with the numbers that it would have had. `tell` is told of every
    network that is trained, by what it was trained for. A `crew` (`esper.ray.Cluster`) trains them
    elsewhere, with the same numbers.
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
        tuning_keys=tuple(FIRST_TUNING_KEY + i for i in range(settings.tuning_keys or TUNING_KEYS)),
        rates=tuple(f * task.learning_rate for f in RATE_FACTORS[: None if settings.tune else 1]),
        record=record,
        crew=crew or Alone(),
        progress=progress,
    )
    if settings.scenario == "scratch":
        arms = choose_arms(bench, controllers, settings.reference)
    else:
        arms = choose_scenario(bench, controllers, settings.reference, settings.extra)
    trained = _train_all(bench, arms, settings.evaluation_keys)
    trials = [trial_of(task, data, arm, run) for runs in trained for arm, run in runs.items()]
    summaries = [summary(arm, trials) for arm in arms]
    return EvaluationReport(
        task=task.name,
        score=task.score.__name__,
        scenario=settings.scenario,
        extra=settings.extra,
        arms_wanted=settings.arms,
        steps=steps,
        keys=tuple(settings.evaluation_keys[: len(trained)]),
        keys_wanted=settings.keys,
        tuning_keys=bench.tuning_keys if bench.tuned_anything else (),
        learning_rates=bench.rates,
        reference=settings.reference,
        population=population,
        precision=settings.precision,
        arms=tuple(summaries),
        comparisons=compare(arms, trials, settings),
        trials=tuple(trials),
        crossover=crossover(summaries, settings.reference, settings.extra),
    )


def _rehearse(task: Task, data: DataSplits, controllers: dict[str, Controller]) -> None:
    """Let every controller decide once, so that one that does not fit the task is found now."""
    situation = first_situation(task, data)
    for controller in controllers.values():
        controller.reset(situation.n_envs)
        controller.act(situation)


def _train_all(bench: Bench, arms: Sequence[Arm], keys: range) -> list[dict[str, Run]]:
    """For each key its trained arms; blocks of keys are the outer loop, so that every result is a
    pair, also after Ctrl-C."""
    at_a_time, done = SIDE_BY_SIDE[bench.population], 0
    blocks = [keys[first : first + at_a_time] for first in range(0, len(keys), at_a_time)]
    known: list[list[dict[str, Run]]] = [[{} for _ in block] for block in blocks]
    jobs = [
        _job(bench, arm, block, runs)
        for block, runs in zip(blocks, known, strict=True)
        for arm in arms
    ]
    total, finished = len(keys) * len(arms), 0

    def begun(job: Job) -> None:
        bench.progress(job.label, finished, total)

    try:
        for runs in carry_out(jobs, bench.record, bench.crew, begun):
            finished += len(runs)
            done += 1
        bench.progress("done", total, total)
    except KeyboardInterrupt:
        if done < len(arms):
            raise
    complete = known[: done // len(arms)]
    # In the order of the arms, whichever was first.
    return [{arm.label: runs[arm.label] for arm in arms} for block in complete for runs in block]


def _job(bench: Bench, arm: Arm, block: Sequence[int], known: Sequence[dict[str, Run]]) -> Job:
    """An arm on some keys; `known` are the runs of each key so far."""

    def tell(trained: Sequence[Run]) -> None:
        for of_key, run in zip(known, trained, strict=True):
            of_key[arm.label] = run

    return Job(
        arm.label,
        lambda: [arm.plan(before) for before in known],
        bench.data,
        block,
        attribute=True,
        keep=True,
        tell=tell,
    )
