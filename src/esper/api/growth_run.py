"""A run of one network: its record, and checkpoints (DIR/checkpoints/epoch-000012) to resume it."""

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from esper.api.growth_warnings import GrowthWarnings
from esper.growth.devices import devices_of, generator_states, set_generator_states
from esper.growth.optimizer import group_settings
from esper.growth.sites import explaining
from esper.growth.snapshot import read_tree, write_tree
from esper.leyline import ConfigError, History, Recorder
from esper.leyline.events import event_from_row
from esper.leyline.files import clear_unfinished, discard, sealed_series
from esper.leyline.growth_settings import GrowthSettings
from esper.observatory.run_directory import CHECKPOINTS, EVENTS, METRICS, RunDirectory, read_rows
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.batches import DataSource
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import GrowthEnv, Session
from esper.tolaria.engine.saved_state import cycle_state, load_cycle_state


def loop_state(env: GrowthCycle, controller: Controller, optimizer: Optimizer) -> dict[str, Any]:
    """Tensors and plain values; the optimizer's own state is saved with the hosts."""
    save = getattr(controller, "state_dict", None)
    return {
        "cycle": cycle_state(env),
        "controller": None if save is None else save(),
        "groups": group_settings(optimizer),
    }


def load_loop_state(
    env: GrowthCycle, controller: Controller, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Raises ConfigError, and changes nothing, if the state is of other hosts."""
    load_cycle_state(env, state["cycle"])
    if state["controller"] is not None:
        controller.load_state_dict(state["controller"])  # type: ignore[attr-defined]
    for group, settings in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(settings)


def randomness(loaders: Iterable[Any], devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """The state of the generators of Python, NumPy, torch (of the CPU and `devices`) and the
    loaders."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002 - user code may use it
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
        "torch": generator_states(devices),
        "loaders": [generator.get_state() for generator in _generators(loaders)],
    }


def restore_randomness(loaders: Iterable[Any], state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    set_generator_states(state["torch"])
    for generator, own in zip(_generators(loaders), state["loaders"], strict=True):
        generator.set_state(own)


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators of loaders and of their samplers, each once."""
    found: list[torch.Generator] = []
    for loader in loaders:
        for owner in _owners(loader):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is g for g in found):
                found.append(generator)
    return found


def _owners(loader: Any) -> Iterator[Any]:
    yield loader
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(loader, name, None)
        if sampler is not None:
            yield from _owners(sampler)


log = logging.getLogger("esper")

FORMAT_VERSION = 5
KEPT = 2

MakeScheduler = Callable[[Optimizer], Any]


class GrowthRun(Session):
    """The session of one network: it keeps a history and, if `open_record` is given, a folder with
    a checkpoint after every epoch, from which the run can be resumed.

    config      settings of the run, for its record; a resumed run must have the same
    listeners   recorders that are called after the record, such as progress bars and trackers
    """

    def __init__(
        self,
        settings: GrowthSettings,
        config: Mapping[str, Any],
        data: DataSource,
        *,
        make_scheduler: MakeScheduler | None = None,
        loaders: tuple[Any, ...] = (),
        open_record: "Callable[[GrowthRun], RunDirectory] | None" = None,
        listeners: Sequence[Recorder] = (),
    ) -> None:
        self.settings, self.config, self.data = settings, dict(config), data
        self.make_scheduler, self.loaders = make_scheduler, loaders
        self.open_record, self.listeners = open_record, listeners
        self.history = History()
        self.record: RunDirectory | None = None
        self.seconds_before, self.began = 0.0, time.monotonic()

    def begin(self, env: GrowthEnv, controller: Controller) -> None:
        assert isinstance(env.population, LoopedPopulation)
        self.env, self.controller = env, controller
        (self.optimizer,) = env.population.optimizers
        make = self.make_scheduler
        self.scheduler = None if make is None else _scheduler(make, self.optimizer)
        self.config["controller"] = controller.name
        if self.open_record is not None:
            # Last, so that a run that cannot start leaves no files.
            self.record = self.open_record(self)
        warnings = GrowthWarnings(self.history, env, controller, self.data)
        warnings.catch_up()
        record = () if self.record is None else (self.record,)
        self.history.listeners = [*record, *self.listeners, warnings]

    def after_epoch(self, env: GrowthEnv) -> bool:
        if env.batches_done:  # 0 after the first evaluation of a trained host
            with explaining(f"the scheduler failed after epoch {env.step_count + 1}"):
                self._step_scheduler()
        self.reason = self._why_end(env)
        if self.record is not None:
            save_run(self.record, self)
        return self.reason is None

    def _why_end(self, env: GrowthEnv) -> str | None:
        patience, best = self.settings.patience, env.best[0]
        if self._out_of_time():
            return "max_time"
        if patience is not None and best is not None and env.step_count - best.step >= patience:
            return "patience"
        return None

    def _out_of_time(self) -> bool:
        limit = self.settings.max_time
        return limit is not None and self.seconds() >= limit

    def seconds(self) -> float:
        """Time spent so far, including earlier parts of a resumed run."""
        return self.seconds_before + time.monotonic() - self.began

    def _step_scheduler(self) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            assert self.env.situation is not None
            self.scheduler.step(float(self.env.situation.signals.val_loss[0]))
        elif self.scheduler is not None:
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {
            "settings": self.config,
            **loop_state(self.env, self.controller, self.optimizer),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "randomness": randomness(self.loaders, devices_of(self.env.population.template)),
            "seconds": self.seconds(),
            "reason": self.reason,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.controller.reset(1)
        load_loop_state(self.env, self.controller, self.optimizer, state)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        restore_randomness(self.loaders, state["randomness"])
        self.seconds_before, reason = state["seconds"], state["reason"]
        # A run that ended by max_time may be resumed with more time.
        self.reason = None if reason == "max_time" and not self._out_of_time() else reason


def _scheduler(make: MakeScheduler, optimizer: Optimizer) -> Any:
    with explaining("the scheduler cannot be made"):
        scheduler = make(optimizer)
    if not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(
            "the scheduler must be a function of an optimizer that returns a scheduler, such as "
            "lambda optimizer: CosineAnnealingLR(optimizer, 30); it returned "
            f"{type(scheduler).__name__}"
        )
    return scheduler


def open_folder(
    folder: Path, run: GrowthRun, *, resume: bool, held: RunDirectory | None = None
) -> RunDirectory:
    """Open the record of a run. With `resume` the run continues from its newest intact checkpoint,
    or starts again if it was killed before its first.

    `held` is the record if the caller has opened it already. Raises ConfigError if the folder holds
    another run, or one with other settings.
    """
    if held is None and RunDirectory.is_run(folder) and not resume:
        raise ConfigError(
            f"{folder} already holds a run; continue it with resume=True, or choose another folder"
        )
    if held is None and not RunDirectory.is_run(folder):
        return RunDirectory.create(folder, run.config, script=True)
    record = held or RunDirectory(folder, script=True)
    if resume:
        try:
            _resume(record, run)
        except BaseException:
            record.close()
            raise
    return record


def _resume(record: RunDirectory, run: GrowthRun) -> None:
    folder = record.path
    state = _newest(folder)
    if state is None:
        _check_nothing_to_lose(folder)
        record.begin(run.config)
        return
    _check_settings(folder, state["settings"], run.config)
    record.resume(run.config, state["files"], next_round=0)
    run.load_state(state)
    run.history.rows[:] = read_rows(folder / METRICS)
    run.history.events[:] = map(event_from_row, read_rows(folder / EVENTS))


def save_run(record: RunDirectory, run: GrowthRun) -> None:
    """Write a checkpoint; the previous one is kept, older ones are deleted."""
    folder = record.path / CHECKPOINTS
    clear_unfinished(folder)
    final = folder / f"epoch-{run.env.step_count:06d}"
    try:
        write_tree(final, {**run.state(), "files": record.sync()}, FORMAT_VERSION)
    except OSError as error:
        raise ConfigError(
            f"the checkpoint {final.name} could not be written: {error.strerror or error}; free "
            "some disk space and resume the run"
        ) from error
    for old in sealed_series(folder, "epoch")[KEPT:]:
        discard(old)


def _newest(run: Path) -> dict[str, Any] | None:
    """The state of the newest intact checkpoint; None if there is no checkpoint."""
    refused = []
    candidates = sealed_series(run / CHECKPOINTS, "epoch")
    for path in candidates:
        try:
            return read_tree(path, FORMAT_VERSION, run)
        except ConfigError as error:
            log.warning("%s; the previous checkpoint is used", error)
            refused.append(str(error))
    if candidates:
        raise ConfigError(f"no checkpoint of {run} can be used: {'; '.join(refused)}")
    return None


def _check_nothing_to_lose(folder: Path) -> None:
    # A run that was killed at the end of its first epoch has one row.
    rows = len(list(read_rows(folder / METRICS))) if (folder / METRICS).exists() else 0
    if rows > 1 or sealed_series(folder / CHECKPOINTS, "round"):
        raise ConfigError(
            f"{folder} holds a run that cannot be resumed: it has no checkpoint of an epoch; "
            "choose another folder"
        )


def _check_settings(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in {**before, **now}:
        if name not in FREE and before.get(name) != now.get(name):
            raise ConfigError(
                f"the run in {folder} was started with {name}={before.get(name)!r}, not "
                f"{now.get(name)!r}; give the same as before, or choose another folder"
            )


# Settings that may change when a run is resumed.
FREE = ("max_time", "device", "progress", "overwrite", "resume", "track", "compare")
