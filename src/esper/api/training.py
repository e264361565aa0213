"""Train a policy with PPO from Python, resume a training run, load a policy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from esper.api.checks import TASK, checked
from esper.leyline import ConfigError
from esper.leyline.files import write_sealed
from esper.leyline.growth_settings import GrowthSettings
from esper.leyline.policy_card import PolicyCard, check_policy_name
from esper.observatory.run_directory import BEST_POLICY, CONFIG, PROFILE, RunDirectory
from esper.proof.arms import validation_score
from esper.simic.agent.rollout import VectorEnv
from esper.simic.recordings.episodes import RecordingEnv
from esper.simic.telemetry.profiler import TrainingProfiler
from esper.simic.training.checkpoint import (
    VERSION,
    card_of,
    is_run,
    load_checkpoint,
    load_state,
    policy_files,
    save_checkpoint,
    write_policy,
)
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.env_specs import env_batch_size, most_steps, recipe_of, space_of
from esper.simic.training.loop import Hooks, run_training
from esper.simic.training.policy_controller import LearnedController
from esper.simic.training.round_log import RoundLog
from esper.simic.training.state import TrainState, lasting_settings, new_state, on
from esper.simic.training.workers import Cluster, growth_environments, worker_devices
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits, share
from esper.tolaria.engine.run import make_env
from esper.tolaria.families import find_family
from esper.tolaria.families.base import Family
from esper.tolaria.fused.choice import choose_population
from esper.tolaria.tasks import Task, find_task


@checked()
def export_policy(run: str | Path, name: str, out: str | Path) -> tuple[Path, PolicyCard]:
    """Write the newest policy of a run to the folder `out`/`name`: its weights, and a card with
    facts about the run. Raises ConfigError if the run has no policy, or if the folder exists."""
    check_policy_name(name)
    state, folder = load_state(run), Path(out) / name
    card = card_of(state, name, _episodes(state))
    try:
        return folder, write_policy(folder, state, card)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error


def _episodes(state: TrainState) -> int | None:
    """How many episodes the policy was trained on; None if that is not known."""
    if state.round > 0:
        return state.round * int(state.settings["envs"])
    return state.settings.get("episodes")


@dataclass(frozen=True)
class ValidationHosts:
    """The validation hosts of a family, for the training run in the folder `run`."""

    config: TrainingConfig
    family: Family
    data: DataSplits
    run: Path

    def score(self, state: TrainState) -> float:
        """The mean score with the policy's most probable actions."""
        kind = self.config.growth.population
        assert kind != "auto", "a run has chosen its population"
        controller = LearnedController(state)
        return validation_score(self.family, controller, self.data, data_root(), population=kind)

    def keep(self, state: TrainState) -> None:
        """Write the policy to the folder `best` of the run. Raises ConfigError, and keeps the
        previous one, if it cannot be written."""
        assert state.best is not None, "only a policy that was validated can be the best"
        card = card_of(state, BEST_POLICY, state.round * self.config.envs)
        evaluated = f"validation hosts of {self.family.name}: {state.best.score:.2f}"
        files = policy_files(state, replace(card, evaluated=evaluated))
        folder = self.run / BEST_POLICY
        if not self.run.is_dir():
            raise ConfigError(f"{self.run} was deleted during the run; start it again")
        try:
            write_sealed(folder, files, VERSION)
        except OSError as error:
            raise ConfigError(
                f"{folder} could not be written: {error.strerror or error}; free some disk space "
                f"and continue with --resume {self.run}"
            ) from error


Workers = int | Literal["auto"] | None


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: the order of floating-point sums, and so every bit of a result,
    depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_task(
    config: TrainingConfig, task: Task | None = None, family: Family | None = None
) -> tuple[Task, Family | None]:
    """The task of a run and its family, if it has one; those given replace those of the config."""
    if family is None and config.family is not None:
        family = find_family(config.family)
    if family is not None and task is not None:
        raise ConfigError("a family has a task of its own; leave out task")
    if family is None and config.validate_every is not None:
        raise ConfigError("validate_every needs a family, which has validation hosts; give one")
    if family is not None:
        return family.task, family
    return (task or find_task(config.task)).adjusted(config.slots, config.batch), None


def choose_devices(
    workers: Workers,
    devices: Sequence[str] | None,
    cluster: Cluster | None,
    device: str | None = None,
) -> tuple[str, ...]:
    """One device for each worker; `device` is that of the settings."""
    if cluster is not None and (devices is not None or device is not None):
        raise ConfigError("workers on a cluster use its CPUs; leave out devices, or give workers")
    if cluster is not None and workers in (None, "auto"):
        workers = cluster.cpus
    return worker_devices(workers, devices, device)


class PolicyTraining:
    """Everything that a training run needs, besides its folder and its state."""

    def __init__(
        self,
        config: TrainingConfig,
        task: Task | None,
        family: Family | None,
        devices: tuple[str, ...],
        cluster: Cluster | None,
    ) -> None:
        self.config, self.devices, self.cluster = config, devices, cluster
        self.task, self.family = choose_task(config, task, family)
        self.space = space_of(self.task, self.family, kind=config.network.kind)

    @cached_property
    def data(self) -> DataSplits:
        """In memory once for all workers of this machine; a cluster makes its own copies."""
        data = self.task.load(data_root())
        return data if len(self.devices) == 1 or self.cluster is not None else share(data)

    def first_state(self) -> TrainState:
        """Also fixes the kind of population for the rest of the run. Raises ConfigError if the
        hosts cannot be fused or the policy to start from is missing."""
        config = self.config
        recipe = recipe_of(config, self.task, self.data, self.family)
        if config.slots is not None:
            make_env(recipe, [0], GrowthSettings(1))  # raises ConfigError if one is not a slot
        count = env_batch_size(config, self.family)
        kind = choose_population(recipe, count, config.growth.population, self.devices[0])
        self.config = replace(config, growth=replace(config.growth, population=kind))
        warm = None if config.warm_start is None else load_state(config.warm_start)
        return new_state(self.config, self.space, warm)

    def check_unchanged(self, run: Path, state: TrainState) -> None:
        before, now = state.settings, lasting_settings(self.config)
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise ConfigError(
                    f"{name} in {run / CONFIG} was changed from {before.get(name)!r} to "
                    f"{now.get(name)!r}; change it back, or start a new run"
                )
        if state.space != self.space:
            raise ConfigError(
                f"{run} was trained with other slots or blueprints than there are now"
            )

    def run(
        self, state: TrainState, record: RunDirectory, profile: int | None, hooks: Hooks | None
    ) -> TrainState:
        config, family, log = self.config, self.family, RoundLog(record)
        hooks, profiler = hooks or Hooks(), TrainingProfiler(record.path / PROFILE, profile)
        users_on_step = hooks.on_step

        def on_step(step: int) -> None:
            profiler.step()
            users_on_step(step)

        def save(state: TrainState) -> None:
            save_checkpoint(record.path, state, record.sync())

        def recorded(env: VectorEnv) -> RecordingEnv:
            return RecordingEnv(env, state.space, config, family, record.path)

        # The policy is where the first worker is; the CPUs of a cluster are CPUs here, too.
        state.agent = on(state.agent, self.devices[0])
        validation = None
        if family is not None:
            validation = ValidationHosts(config, family, self.data, record.path)
        with growth_environments(
            config, self.task, self.data, log, self.devices, family, self.cluster
        ) as env:
            return run_training(
                config,
                state,
                recorded(env) if config.keep_episodes else env,
                most_steps(config, self.task, self.data, family),
                log,
                save=save,
                validation=validation,
                traced=profiler.traced,
                hooks=replace(hooks, on_step=on_step),
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
    """Train a policy; the record and the checkpoints are written to the folder `out`.

    `task` and `family` replace those that the config names. The hosts are trained by one worker, by
    `workers` processes on the CPU ("auto": one per core), by one worker for each of `devices`, such
    as "cuda:0", or on a `cluster` (`esper.ray.Cluster`), by default with one worker per CPU.
    Scripts with several workers need `if __name__ == "__main__":`. The policy is on the first
    device. Workers and devices change only the speed. `profile` is the number of a round, counted
    from 0: traces of its first steps and of its update are written to the folder `profile` of the
    run.
    """
    _check_profile(profile, 0, config.rounds)
    training = PolicyTraining(
        config,
        task,
        family,
        choose_devices(workers, devices, cluster, config.growth.device),
        cluster,
    )
    state = training.first_state()
    with RunDirectory.create(Path(out), training.config.flat(), overwrite=overwrite) as record:
        save_checkpoint(record.path, state, record.sync())
        return training.run(state, record, profile, hooks)


def config_of(run: Path, rounds: int | None = None) -> TrainingConfig:
    """The settings of a training run, with other `rounds` if given. Raises ConfigError if the
    folder holds no training run."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is not the folder of a training run: it has no {CONFIG}")
    return load_config(run / CONFIG, {"rounds": rounds}, presets=False)


def episode_steps(config: TrainingConfig) -> int:
    """The maximum number of decisions in an episode of a run with these settings."""
    task, family = choose_task(config)
    if family is None:
        return config.growth.steps or task.steps
    return family.most_steps(task.load(data_root()))


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
    """Continue a run from its newest intact checkpoint, up to `rounds` if given.

    However often a run is killed and resumed, it ends with the same parameters and history.
    """
    run = Path(run)
    config_of(run)
    # Locked before anything is read, so that no other process changes it meanwhile.
    with RunDirectory(run) as record:
        config = config_of(run, rounds)
        chosen = choose_devices(workers, devices, cluster, config.growth.device)
        training = PolicyTraining(config, task, family, chosen, cluster)
        if is_run(run):
            checkpoint = load_checkpoint(run)
            state = checkpoint.state
            training.check_unchanged(run, state)
            _check_profile(profile, state.round, config.rounds)
            record.resume(config.flat(), checkpoint.files, state.round)
        else:  # killed before its first checkpoint
            state = training.first_state()
            record.begin(training.config.flat())
            save_checkpoint(run, state, record.sync())
        return training.run(state, record, profile, hooks)


def _check_profile(profile: int | None, first: int, rounds: int) -> None:
    if profile is not None and not first <= profile < rounds:
        raise ConfigError(
            f"round {profile} cannot be profiled: the rounds to play are {first} up to, "
            f"but not including, {rounds}"
        )
