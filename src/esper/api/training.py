"""Train a policy from Python: the loop, its environments and the record of the run, wired up."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from esper.api.checks import TASK, checked
from esper.api.policies import ValidationHosts
from esper.leyline import ConfigError
from esper.observatory.run_directory import CONFIG, PROFILE, RunDirectory
from esper.simic.agent.rollout import VectorEnv
from esper.simic.recordings.recording import RecordingEnv
from esper.simic.telemetry.profiler import TrainingProfiler
from esper.simic.training.checkpoint import is_run, load_checkpoint, load_state, save_checkpoint
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.env_specs import env_batch_size, most_steps, recipe_of, space_of
from esper.simic.training.loop import Hooks, run_training
from esper.simic.training.round_log import RoundLog
from esper.simic.training.space import Space
from esper.simic.training.state import TrainState, lasting_settings, new_state
from esper.simic.training.workers import Cluster, growth_environments, worker_devices
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.shared import share
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.families import find_family
from esper.tolaria.families.base import Family
from esper.tolaria.fused.choice import choose_population
from esper.tolaria.tasks import find_task
from esper.tolaria.tasks.base import Task

Workers = int | Literal["auto"] | None


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums depend on how they are split over threads, from the first weights on; one thread gives
    the same bits in every process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Chosen:
    """What a run's hosts are of."""

    task: Task
    family: Family | None

    @staticmethod
    def of(config: TrainingConfig, task: Task | None, family: Family | None) -> "Chosen":
        if family is None and config.family is not None:
            family = find_family(config.family)
        if family is not None and task is not None:
            raise ConfigError("a family has a task of its own; leave out task")
        if family is None and config.validate_every is not None:
            raise ConfigError(
                "only a family has hosts to validate on; give one, or leave out validate_every"
            )
        return Chosen(family.task if family else task or find_task(config.task), family)

    def space(self, config: TrainingConfig) -> Space:
        return space_of(self.task, self.family, kind=config.network.kind)


@dataclass(frozen=True)
class Places:
    """Where hosts are trained: by one worker for each of `devices`, here or on a cluster."""

    devices: tuple[str, ...]
    cluster: Cluster | None

    @staticmethod
    def of(
        workers: Workers, devices: Sequence[str] | None, cluster: Cluster | None = None
    ) -> "Places":
        if cluster is not None and devices is not None:
            raise ConfigError(
                "workers on a cluster have its processors; leave out devices, and say how many "
                "with workers"
            )
        if cluster is not None and workers in (None, "auto"):
            workers = cluster.cpus
        return Places(worker_devices(workers, devices), cluster)

    def share(self, data: DataSplits) -> DataSplits:
        """The data, once for all workers of this machine; a cluster keeps it for its own."""
        return data if len(self.devices) == 1 or self.cluster is not None else share(data)

    def environments(
        self, config: TrainingConfig, chosen: Chosen, data: DataSplits, log: RoundLog
    ) -> AbstractContextManager[VectorEnv]:
        return growth_environments(
            config, chosen.task, data, log, self.devices, chosen.family, self.cluster
        )


@checked(task=TASK)
@one_thread()
def train_ppo(
    config: TrainingConfig,
    out: str | Path,
    *,
    task: Task | None = None,
    family: Family | None = None,
    overwrite: bool = False,
    workers: Workers = None,
    devices: Sequence[str] | None = None,
    cluster: Cluster | None = None,
    profile: int | None = None,
    hooks: Hooks | None = None,
) -> TrainState:
    """Train from the start; the record and the checkpoints go to the folder `out`.

    `task` stands in for the one that the config names, and so does `family`. The hosts are trained
    by one worker, by as many as `workers` on the CPU ("auto": one per core), or by one for each of
    `devices`, such as "cuda:0". With several, call it below `if __name__ == "__main__":`. With a
    `cluster` (`esper.ray.Cluster`) workers are there, as many as it has CPUs unless `workers` says
    otherwise. Where hosts are trained changes nothing but the speed. `profile`
    is the number of a round, the first being 0: traces of its first steps and of its update go to
    the folder `profile` of the run.
    """
    places = Places.of(workers, devices, cluster)
    _check_profile(profile, 0, config.rounds)
    chosen = Chosen.of(config, task, family)
    data = places.share(chosen.task.load(data_root()))
    config = _settled(config, chosen, data, places.devices)
    state = _first_state(config, chosen)
    with RunDirectory.create(Path(out), config.flat(), overwrite=overwrite) as record:
        save_checkpoint(record.path, state, record.sync())
        return _run(config, chosen, data, state, record, places, profile, hooks)


def config_of(run: Path, rounds: int | None = None) -> TrainingConfig:
    """The settings of a training run, up to `rounds` if given; raises ConfigError if the folder is
    not of one."""
    _require_run(run)
    return load_config(run / CONFIG, {"rounds": rounds}, presets=False)


def episode_steps(config: TrainingConfig) -> int:
    """The most decisions of an episode of a run with these settings."""
    chosen = Chosen.of(config, None, None)
    if chosen.family is None:
        return config.growth.steps or chosen.task.steps
    return chosen.family.most_steps(chosen.task.load(data_root()))


def _require_run(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} is not the folder of a training run: it has no {CONFIG}")


@checked(task=TASK)
@one_thread()
def resume_ppo(
    run: str | Path,
    *,
    task: Task | None = None,
    family: Family | None = None,
    rounds: int | None = None,
    workers: Workers = None,
    devices: Sequence[str] | None = None,
    cluster: Cluster | None = None,
    profile: int | None = None,
    hooks: Hooks | None = None,
) -> TrainState:
    """Go on from the newest intact checkpoint of a run, up to `rounds` if given.

    However often a run is killed and resumed, it ends with the same parameters and history.
    """
    places = Places.of(workers, devices, cluster)
    run = Path(run)
    _require_run(run)
    # Opened, and so locked, first: nobody may add to what is read from here on.
    with RunDirectory(run) as record:
        config = config_of(run, rounds)
        chosen = Chosen.of(config, task, family)
        if is_run(run):
            checkpoint = load_checkpoint(run)
            state = checkpoint.state
            _check_unchanged(run, config, chosen, state)
            _check_profile(profile, state.round, config.rounds)
            data = places.share(chosen.task.load(data_root()))
            record.resume(config.flat(), checkpoint.files, state.round)
        else:
            # Killed before the first checkpoint: nothing had happened yet.
            data = places.share(chosen.task.load(data_root()))
            config = _settled(config, chosen, data, places.devices)
            state = _first_state(config, chosen)
            record.begin(config.flat())
            save_checkpoint(run, state, record.sync())
        return _run(config, chosen, data, state, record, places, profile, hooks)


def _first_state(config: TrainingConfig, chosen: Chosen) -> TrainState:
    """A policy that is missing is found here, before anything is written."""
    warm = None if config.warm_start is None else load_state(config.warm_start)
    return new_state(config, chosen.space(config), warm)


def _settled(
    config: TrainingConfig, chosen: Chosen, data: DataSplits, devices: Sequence[str]
) -> TrainingConfig:
    """The settings with the population that the run keeps for good; what cannot be fused is refused
    before anything is written."""
    recipe = recipe_of(config, chosen.task, data, chosen.family)
    count = env_batch_size(config, chosen.family)
    kind = choose_population(recipe, count, config.growth.population, devices[0])
    return replace(config, growth=replace(config.growth, population=kind))


def _check_unchanged(run: Path, config: TrainingConfig, chosen: Chosen, state: TrainState) -> None:
    before, now = state.settings, lasting_settings(config)
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"{run / CONFIG} was changed: {name} is {now.get(name)!r}, but the run began with "
                f"{before.get(name)!r}; put that back, or start a new run"
            )
    if state.space != chosen.space(config):
        raise ConfigError(f"{run} was trained with other slots or blueprints than there are now")


def _check_profile(profile: int | None, first: int, rounds: int) -> None:
    if profile is not None and not first <= profile < rounds:
        raise ConfigError(
            f"round {profile} cannot be profiled: the rounds to play are {first} up to, "
            f"but not including, {rounds}"
        )


def _run(
    config: TrainingConfig,
    chosen: Chosen,
    data: DataSplits,
    state: TrainState,
    record: RunDirectory,
    places: "Places",
    profile: int | None,
    hooks: Hooks | None,
) -> TrainState:
    log, hooks = RoundLog(record), hooks or Hooks()
    profiler = TrainingProfiler(record.path / PROFILE, profile)
    told = hooks.on_step

    def on_step(step: int) -> None:
        profiler.step()
        told(step)

    def save(state: TrainState) -> None:
        save_checkpoint(record.path, state, record.sync())

    task, family = chosen.task, chosen.family
    with places.environments(config, chosen, data, log) as env:
        kept = RecordingEnv(env, state.space, record.path) if config.keep_episodes else env
        return run_training(
            config,
            state,
            kept,
            most_steps(config, task, data, family),
            log,
            save=save,
            validation=None
            if family is None
            else ValidationHosts(config, family, data, record.path),
            traced=profiler.traced,
            hooks=replace(hooks, on_step=on_step),
        )
