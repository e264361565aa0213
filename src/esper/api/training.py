"""Train a policy from Python: the loop, its environments and the record of the run, wired up."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from esper.leyline import ConfigError
from esper.observatory.run_directory import CONFIG, RunDirectory
from esper.simic.training.checkpoint import is_run, load_checkpoint, load_state, save_checkpoint
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.growth_rounds import GrowthRounds
from esper.simic.training.loop import Hooks, Tally, run_training
from esper.simic.training.shard import space_of
from esper.simic.training.state import TrainState, new_state
from esper.simic.training.workers import worker_devices
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.tasks import Task, find_task


def train_ppo(
    config: TrainingConfig,
    out: str | Path,
    *,
    task: Task | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    devices: Sequence[str] | None = None,
    hooks: Hooks | None = None,
) -> TrainState:
    """Train from the start; the record and the checkpoints go to the folder `out`.

    `task` stands in for the one that the config names. The hosts are trained by one worker, by as
    many as `workers` on the CPU, or by one for each of `devices`, such as "cuda:0". With several,
    call it below `if __name__ == "__main__":`.
    """
    torch.set_num_threads(1)
    places = worker_devices(workers, devices)
    chosen = task or find_task(config.task)
    state = _first_state(config, chosen)
    with RunDirectory.create(Path(out), config.flat(), overwrite=overwrite) as record:
        save_checkpoint(record.path, state, record.sync())
        return _run(config, chosen, state, record, places, hooks)


def resume_ppo(
    run: str | Path,
    *,
    task: Task | None = None,
    rounds: int | None = None,
    workers: int | None = None,
    devices: Sequence[str] | None = None,
    hooks: Hooks | None = None,
) -> TrainState:
    """Go on from the newest intact checkpoint of a run, up to `rounds` if given.

    However often a run is killed and resumed, it ends with the same parameters and history.
    """
    torch.set_num_threads(1)
    places = worker_devices(workers, devices)
    run = Path(run)
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is not the folder of a training run: it has no {CONFIG}")
    # Opened, and so locked, first: nobody may add to what is read from here on.
    with RunDirectory(run) as record:
        config = load_config(run / CONFIG, {"rounds": rounds}, presets=False)
        chosen = task or find_task(config.task)
        if is_run(run):
            checkpoint = load_checkpoint(run)
            state = checkpoint.state
            _check_unchanged(run, config, chosen, state)
            chosen.load(data_root())
            record.go_on(config.flat(), checkpoint.files, state.round)
        else:
            # Killed before the first checkpoint: nothing had happened yet.
            state = _first_state(config, chosen)
            record.begin(config.flat())
            save_checkpoint(run, state, record.sync())
        return _run(config, chosen, state, record, places, hooks)


def _first_state(config: TrainingConfig, task: Task) -> TrainState:
    """Data or a policy that is missing is found here, before anything is written."""
    warm = None if config.warm_start is None else load_state(config.warm_start)
    state = new_state(config, space_of(task), warm)
    task.load(data_root())
    return state


def _check_unchanged(run: Path, config: TrainingConfig, task: Task, state: TrainState) -> None:
    if set(state.rewards) != set(config.modes) or state.agent.config != config.ppo:
        raise ConfigError(f"{run / CONFIG} was changed: it does not fit the checkpoint any more")
    if state.space != space_of(task):
        raise ConfigError(f"{run} was trained with other slots or blueprints than there are now")


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums depend on how they are split over threads, from the first weights on; one thread gives
    the same bits in every process. What was set before is set again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(
    config: TrainingConfig,
    task: Task,
    state: TrainState,
    record: RunDirectory,
    devices: Sequence[str],
    hooks: Hooks | None,
) -> TrainState:
    tally = Tally(record)

    def save(state: TrainState) -> None:
        save_checkpoint(record.path, state, record.sync())

    with GrowthRounds(config, task, tally, devices) as env:
        return run_training(config, state, env, env.max_steps, tally, save=save, hooks=hooks)
