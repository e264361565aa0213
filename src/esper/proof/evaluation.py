"""Evaluation: all arms on paired keys, with control arms.

What an arm may choose (its learning rate, its width), it chooses on validation data of tuning keys.
Then every arm is trained on every evaluation key. Test data are read only after that, once for each
network.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from esper.leyline import ConfigError
from esper.proof.arms import Run
from esper.proof.depth import depth_arms, saving
from esper.proof.jobs import Job, LocalWorker, WorkerPool, run_jobs
from esper.proof.record import OnRun, Record
from esper.proof.report import EvaluationReport, compare, crossover, result_of, summary
from esper.proof.scenarios import Arm, Bench, scratch_arms, trained_arms
from esper.proof.settings import FIRST_TUNING_KEY, EvaluationSettings
from esper.proof.statistics import require_scipy
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.objectives import named
from esper.tolaria.engine.run import GrowthSettings, make_env
from esper.tolaria.fused.choice import PopulationKind, choose_population
from esper.tolaria.tasks import Task

# With 3 keys the choice follows noise: on digits they prefer a third of the host's learning rate,
# with 5 and with 8 they do not, on validation alone.
TUNING_KEYS = 8
RATE_FACTORS = (1.0, 1 / 3, 3.0)
# Keys of an arm that are trained together; Ctrl-C loses those in training.
KEYS_AT_A_TIME: dict[PopulationKind, int] = {"looped": 1, "fused": 32}


def evaluate(
    task: Task,
    data: DataSplits,
    settings: EvaluationSettings,
    make_arm: Callable[[str], Controller],
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
    *,
    folder: Path | None = None,
    on_run: OnRun = lambda label, run: None,
    workers: WorkerPool | None = None,
) -> EvaluationReport:
    """Train the arms and compare them. `make_arm` turns the name of an arm into its controller.

    Bad input raises EsperError before anything is trained beyond one epoch. After Ctrl-C the keys
    that are complete are reported; KeyboardInterrupt is raised if there is none.

    Every trained network is written to `folder` at once. An evaluation of the same settings that is
    already there is continued, with the same numbers as without the interruption. `on_run` is
    called with the label and the run of every network. `workers` (`esper.ray.Cluster`) train the
    networks on other machines, with the same numbers.
    """
    require_scipy()
    controllers = {name: make_arm(name) for name in settings.arms}
    growth = settings.growth
    if workers is not None and growth.device is not None:
        raise ConfigError(f"other machines train on their CPUs; leave out device={growth.device!r}")
    task = replace(task, precision=growth.precision or "fp32")
    _check_controllers(task, data, controllers)
    record = Record(folder, {"task": task.name, **asdict(settings)}, on_run)
    population = record.choose_once(
        "population",
        lambda: choose_population(task.recipe(data), settings.keys, growth.population),
    )
    tuning_keys = range(FIRST_TUNING_KEY, FIRST_TUNING_KEY + (settings.tuning_keys or TUNING_KEYS))
    factors = RATE_FACTORS if settings.tune else RATE_FACTORS[:1]
    bench = Bench(
        task,
        data,
        settings.steps or task.steps,
        population,
        growth,
        tuning_keys=tuple(tuning_keys),
        rates=tuple(factor * task.learning_rate for factor in factors),
        record=record,
        workers=workers or LocalWorker(growth.device),
        progress=progress,
    )
    if settings.scenario == "scratch":
        arms = scratch_arms(bench, controllers, settings.reference)
    elif settings.scenario == "depth":
        arms = depth_arms(bench, controllers, settings.extra)
    else:
        arms = trained_arms(bench, controllers, settings.reference, settings.extra)
    return _report(bench, settings, arms, _train_arms(bench, arms, settings.evaluation_keys))


def _report(
    bench: Bench, settings: EvaluationSettings, arms: Sequence[Arm], trained: list[dict[str, Run]]
) -> EvaluationReport:
    """Test every network once, and compare. `trained` has the runs of each complete key."""
    task, data = bench.task, bench.data
    results = [result_of(task, data, arm, run) for runs in trained for arm, run in runs.items()]
    summaries = [summary(arm, results) for arm in arms]
    return EvaluationReport(
        task=task.name,
        score=named(task.score).__name__,
        scenario=settings.scenario,
        extra=settings.extra,
        arms_wanted=settings.arms,
        steps=bench.steps,
        keys=tuple(settings.evaluation_keys[: len(trained)]),
        keys_wanted=settings.keys,
        tuning_keys=bench.tuning_keys if any(bench.runs) else (),
        learning_rates=bench.rates,
        reference=settings.reference,
        population=bench.population,
        precision=task.precision,
        arms=tuple(summaries),
        comparisons=compare(arms, results, settings),
        trials=tuple(results),
        crossover=saving(results, settings.reference, settings.extra)
        if settings.scenario == "depth"
        else crossover(summaries, settings.reference, settings.extra),
    )


def _check_controllers(task: Task, data: DataSplits, controllers: dict[str, Controller]) -> None:
    """Let every controller decide once: one that does not fit the task raises its error now."""
    rules = GrowthSettings(task.steps, schedule=task.schedule)
    situation = make_env(task.recipe(data), [0], rules).reset()
    for controller in controllers.values():
        controller.reset(situation.n_envs)
        controller.act(situation)


def _train_arms(bench: Bench, arms: Sequence[Arm], keys: range) -> list[dict[str, Run]]:
    """The runs of each complete key, by label. Blocks of keys are the outer loop, so that all
    results are paired, also after Ctrl-C."""
    size = KEYS_AT_A_TIME[bench.population]
    blocks = [keys[first : first + size] for first in range(0, len(keys), size)]
    runs: list[list[dict[str, Run]]] = [[{} for _ in block] for block in blocks]
    jobs = [
        Job(arm.label, arm.plan, bench.data, block, known, attribute=True, keep=True)
        for block, known in zip(blocks, runs, strict=True)
        for arm in arms
    ]
    total, networks, done = len(keys) * len(arms), 0, 0

    def on_start(job: Job) -> None:
        bench.progress(job.label, networks, total)

    try:
        for found in run_jobs(jobs, bench.record, bench.workers, on_start):
            networks += len(found)
            done += 1
        bench.progress("done", total, total)
    except KeyboardInterrupt:
        if done < len(arms):
            raise
    complete = [of_key for block in runs[: done // len(arms)] for of_key in block]
    # In the order of the arms, whichever was trained first.
    return [{arm.label: of_key[arm.label] for arm in arms} for of_key in complete]
