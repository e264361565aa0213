"""`esper train ppo`: settings, live progress, and an orderly end on Ctrl-C."""

import logging
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from esper.api.training import resume_ppo, train_ppo
from esper.leyline import ConfigError
from esper.observatory.run_directory import CONFIG
from esper.observatory.training_progress import RoundProgress
from esper.simic.training.config import load_config
from esper.simic.training.loop import Hooks
from esper.tolaria.tasks import find_task


@dataclass(frozen=True)
class PPOCommand:
    """`flags` by the names of settings, None for those not given."""

    flags: dict[str, Any]
    config: str | None
    out: str | None
    resume: str | None
    workers: int | None
    devices: str | None
    profile: int | None
    overwrite: bool


class LeaveRoundError(Exception):
    """Leave the round where it is."""


class Interrupts:
    """Counts Ctrl-C: the first one asks for an end after the round, the second after the step."""

    def __init__(self, console: Console) -> None:
        self.console, self.count = console, 0

    def __enter__(self) -> "Interrupts":
        self.before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _note(self, number: int, frame: object) -> None:
        self.count += 1
        if self.count == 1:
            self.console.print("finishing the round; Ctrl-C again to leave it now")

    def after_round(self) -> bool:
        return self.count > 0

    def after_step(self) -> None:
        if self.count > 1:
            raise LeaveRoundError


def run(command: PPOCommand) -> None:
    """Everything that can be wrong is found before the first round; raises EsperError."""
    logging.basicConfig(format="esper: %(message)s")
    console = Console()
    if command.resume is None:
        config = load_config(command.config, command.flags)
        out = Path(command.out or f"runs/ppo-{config.task}-{config.key}")
    else:
        _refuse_changes(command)
        out = Path(command.resume)
        if not (out / CONFIG).is_file():
            raise ConfigError(f"{out} is not the folder of a training run: it has no {CONFIG}")
        config = load_config(out / CONFIG, {"rounds": command.flags["rounds"]}, presets=False)
    steps = config.steps or find_task(config.task).steps
    with Interrupts(console) as interrupts, RoundProgress(console, config.rounds, steps) as show:

        def on_step(step: int) -> None:
            show.step(step)
            interrupts.after_step()

        how: dict[str, Any] = {
            "workers": command.workers,
            "devices": None if command.devices is None else command.devices.split(","),
            "profile": command.profile,
            "hooks": Hooks(show.round, on_step, interrupts.after_round),
        }
        try:
            if command.resume is None:
                state = train_ppo(config, out, overwrite=command.overwrite, **how)
            else:
                state = resume_ppo(out, rounds=command.flags["rounds"], **how)
            done = state.round
        except LeaveRoundError:
            done = None
    _conclude(console, out, done, config.rounds)


def _refuse_changes(command: PPOCommand) -> None:
    """A run goes on with the settings it was started with; only its length may change."""
    given = [name for name, value in command.flags.items() if value is not None]
    given += [name for name in ("config", "out") if getattr(command, name) is not None]
    changed = [name for name in given if name != "rounds"]
    if changed:
        raise ConfigError(
            f"--resume goes on with the settings of the run; leave out {', '.join(changed)}"
        )


def _conclude(console: Console, out: Path, done: int | None, rounds: int) -> None:
    if done is None:
        console.print(f"left within a round; go on with [bold]esper train ppo --resume {out}[/]")
    elif done < rounds:
        console.print(f"{done} rounds; go on with [bold]esper train ppo --resume {out}[/]")
    else:
        console.print(f"{done} rounds; use the policy with [bold]esper grow --controller {out}[/]")
