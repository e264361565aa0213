"""One run of `grow`: what it consists of, how it goes, and how it is taken up after a kill.

DIR/checkpoints/epoch-000012/   everything that the next epoch depends on
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from esper.api.loop_state import load_loop_state, loop_state
from esper.api.randomness import randomness, restore_randomness
from esper.growth.storage import read_tree, write_tree
from esper.leyline import ConfigError, History
from esper.leyline.events import event_from_row
from esper.leyline.sealed import clear_unfinished, discard, sealed_series
from esper.observatory.run_directory import CHECKPOINTS, EVENTS, METRICS, RunDirectory, read_rows
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.environment import GrowthEnv
from esper.tolaria.engine.run import play

log = logging.getLogger("esper")

FORMAT_VERSION = 2
KEPT = 2


@dataclass
class StopRule:
    """When to end before all epochs are trained; `reason` says which rule it was.

    patience   epochs without a better score; max_time   seconds, over all parts of a run
    """

    patience: int | None = None
    max_time: float | None = None
    reason: str | None = None
    seconds_before: float = 0.0
    began: float = field(default_factory=lambda: time.monotonic())

    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.began

    def look(self, env: GrowthEnv) -> None:
        best = env.best[0]
        waited = 0 if best is None else env.step_count - best.step
        if self.patience is not None and waited >= self.patience:
            self.reason = "patience"
        if self._out_of_time():
            self.reason = "max_time"

    def take_up(self, seconds: float, reason: str | None) -> None:
        """Count on from a run that was saved; one that was out of time may be given more."""
        self.seconds_before = seconds
        self.reason = None if reason == "max_time" and not self._out_of_time() else reason

    def _out_of_time(self) -> bool:
        return self.max_time is not None and self.seconds() >= self.max_time


@dataclass
class GrowthRun:
    """The parts of a run with one host; `settings` are those that must not change in it."""

    env: GrowthEnv
    controller: Controller
    history: History
    optimizer: Optimizer
    scheduler: Any
    loaders: tuple[Any, ...]
    stop: StopRule
    settings: dict[str, Any]

    def play(self, record: RunDirectory | None) -> str:
        """Train to the end, with a checkpoint after every epoch if there is a record; gives the
        reason why it is the end."""
        if self.stop.reason is not None:
            return self.stop.reason

        def after_epoch() -> bool:
            if self.env.batches_done:  # a trained host is only looked at before its first epoch
                self._step_scheduler()
            self.stop.look(self.env)
            if record is not None:
                save_run(record, self)
            return self.stop.reason is None

        if not play(self.env, self.controller, after_epoch=after_epoch):
            return "interrupted"
        return self.stop.reason or "finished"

    def _step_scheduler(self) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            assert self.env.situation is not None
            self.scheduler.step(float(self.env.situation.signals.val_loss[0]))
        elif self.scheduler is not None:
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            **loop_state(self.env, self.controller, self.optimizer),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "randomness": randomness(self.loaders),
            "seconds": self.stop.seconds(),
            "reason": self.stop.reason,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.controller.reset(1)
        load_loop_state(self.env, self.controller, self.optimizer, state)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        restore_randomness(self.loaders, state["randomness"])
        self.stop.take_up(state["seconds"], state["reason"])


def open_record(folder: Path, run: GrowthRun, *, resume: bool) -> RunDirectory:
    """The record of a run, which goes on from its newest intact checkpoint if it is to `resume`.

    A folder with nothing in it, or with a run that was killed before its first epoch was over, is
    begun anew. Raises ConfigError if the folder holds another run, or one with other settings.
    """
    if RunDirectory.is_run(folder) and not resume:
        raise ConfigError(
            f"{folder} already holds a run; go on with it (resume=True), or choose another folder"
        )
    if not RunDirectory.is_run(folder):
        return RunDirectory.create(folder, run.settings, script=True)
    record = RunDirectory(folder, script=True)
    try:
        state = _newest(folder)
        if state is None:
            _check_nothing_to_lose(folder)
            record.begin(run.settings)
            return record
        _check_settings(folder, state["settings"], run.settings)
        record.resume(run.settings, state["files"], next_round=0)
        run.load_state(state)
        run.history.rows[:] = read_rows(folder / METRICS)
        run.history.events[:] = map(event_from_row, read_rows(folder / EVENTS))
    except BaseException:
        record.close()
        raise
    return record


def save_run(record: RunDirectory, run: GrowthRun) -> None:
    """A checkpoint of the run as it is; the one before is kept, older ones go."""
    folder = record.path / CHECKPOINTS
    clear_unfinished(folder)
    final = folder / f"epoch-{run.env.step_count:06d}"
    try:
        write_tree(final, {**run.state(), "files": record.sync()}, FORMAT_VERSION)
    except OSError as error:
        raise ConfigError(
            f"the checkpoint {final.name} could not be written: {error.strerror or error}; make "
            "room and call grow again with resume=True"
        ) from error
    for old in sealed_series(folder, "epoch")[KEPT:]:
        discard(old)


def _newest(run: Path) -> dict[str, Any] | None:
    """The state of the newest intact checkpoint; None if there is none at all."""
    refused = []
    candidates = sealed_series(run / CHECKPOINTS, "epoch")
    for path in candidates:
        try:
            return read_tree(path, FORMAT_VERSION, run)
        except ConfigError as error:
            log.warning("%s; the one before it is used", error)
            refused.append(str(error))
    if candidates:
        raise ConfigError(f"no checkpoint of {run} can be used: {'; '.join(refused)}")
    return None


def _check_nothing_to_lose(folder: Path) -> None:
    # A run that was killed at the end of its first epoch has told of it.
    told = len(list(read_rows(folder / METRICS))) if (folder / METRICS).exists() else 0
    if told > 1 or sealed_series(folder / CHECKPOINTS, "round"):
        raise ConfigError(
            f"{folder} holds a run that grow cannot take up: it has no checkpoint of an epoch; "
            "choose another folder"
        )


def _check_settings(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"the run in {folder} began with {name}={before.get(name)!r}, and this call has "
                f"{now.get(name)!r}; give what it began with, or choose another folder"
            )
