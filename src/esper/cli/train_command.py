"""`esper train ppo`: its flags, live progress, and the end on Ctrl-C."""

import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from esper.cli.options import (
    BATCH,
    RAY,
    SLOTS,
    TRACK,
    check_track,
    cluster_at,
    growth_options,
    open_tracker,
    option,
)
from esper.cli.printing import Output
from esper.leyline import ConfigError
from esper.leyline.constants import MOST_COUNT, MOST_ENVS, MOST_KEY
from esper.observatory.run_directory import BEST_POLICY

Workers = int | Literal["auto"] | None

if TYPE_CHECKING:
    from rich.console import Console

    from esper.simic.training.config import TrainingConfig
    from esper.simic.training.loop import Hooks
    from esper.simic.training.state import BestPolicy


def setting(name: str, help: str, **more: Any) -> Any:
    """A flag for a setting of the training run, by its dotted name."""
    return option(None, help, setting=name, **more)


# Settings that the task or family has, or that are for runs with one network.
NOT_FOR_TRAINING = (
    *("start", "schedule.warmup", "schedule.decay", "cooling", "insured", "max_grad_norm"),
    *("batches_per_epoch", "patience", "max_time", "progress", "device"),
)


@dataclass(frozen=True)
class PPOSettings:
    task: str | None = setting("task", "What the hosts learn; default digits.")
    rounds: int | None = setting(
        "rounds", "Rounds to play and learn from; default 200.", min=1, max=MOST_COUNT
    )
    envs: int | None = setting(
        "envs", "Host trainings per round; default 16.", min=1, max=MOST_COUNT
    )
    family: str | None = setting(
        "family", "Draw hosts from this family, such as digits:mixed; default: all the same."
    )
    group: int | None = setting(
        "group", "Environments with the same host and data; default 1, for a family 8.", min=1
    )
    slots: str | None = setting("slots", SLOTS)
    batch: int | None = setting("batch", BATCH, min=1, max=MOST_COUNT)
    key: int | None = setting(
        "key", "Random seed: the same key gives the same run; default 0.", min=0, max=MOST_KEY
    )
    out: str | None = option(None, "Folder for the run. Default: runs/ppo-TASK-KEY.")
    config: str | None = option(None, "TOML file with settings; flags override it.")
    resume: str | None = option(None, "Continue the run in this folder.")
    network: str | None = setting(
        "network.kind", "flat, for the slots of its task; or set, for any slots and blueprints."
    )
    workers: str | None = option(
        None,
        "Processes that train hosts, or auto: one per core. Changes only the speed. Default: "
        "1; auto with --ray.",
    )
    device: str | None = option(
        None,
        "Where hosts and the policy are trained: cpu, auto, cuda, mps, xpu; or several, such as "
        "cuda:0,cuda:1, with a worker each. Default: cpu.",
    )
    ray: str | None = option(None, RAY)
    reward: str | None = setting(
        "reward_mode", "Reward mode; default objective. docs/rewards.md lists them."
    )
    validate_every: int | None = setting(
        "validate_every",
        "Evaluate the policy on the family's validation hosts every so many rounds; the best one "
        "is kept in the folder best of the run. Default: never.",
        min=1,
        max=MOST_COUNT,
    )
    learning_rate: float | None = setting("ppo.learning_rate", "Learning rate of the policy.")
    entropy_coef: float | None = setting("ppo.entropy_coef", "Weight of the entropy bonus.")
    gamma: float | None = setting("ppo.gamma", "Discount factor of rewards.")
    warm_start: str | None = setting(
        "warm_start", "Run whose policy is the start, such as an imitation."
    )
    overwrite: bool = option(False, "Replace a run that is already there.")
    profile: int | None = option(
        None, "Write traces of this round, counted from 0, that open in Perfetto.", min=0
    )

    track: str | None = option(None, TRACK)
    growth: Mapping[str, Any] = growth_options(without=NOT_FOR_TRAINING)

    def given(self) -> dict[str, Any]:
        return given_settings(self)


def given_settings(flags: Any) -> dict[str, Any]:
    """The settings of a training run that were given as flags, by dotted name."""
    named = {f.metadata["setting"]: f.name for f in fields(flags) if "setting" in f.metadata}
    values = {name: getattr(flags, flag) for name, flag in named.items()}
    own = {f"growth.{name}": value for name, value in flags.growth.items()}
    return own | {name: value for name, value in values.items() if value is not None}


def ppo(output: Output, settings: PPOSettings) -> None:
    """Train a policy by PPO over many host trainings.

    Ctrl-C ends the run after the current round, with a checkpoint. A second Ctrl-C ends it after
    the current step; --resume then repeats the round.

    Examples:

      esper train ppo --task digits --rounds 200 --envs 16 --out runs/first

      esper train ppo --resume runs/first

      esper grow --controller runs/first
    """
    # All input is checked before the first round.
    import logging

    from esper.api import resume_ppo, train_ppo

    logging.basicConfig(format="esper: %(message)s")
    config, out = _config_and_folder(settings)
    done: int | None = None
    best: BestPolicy | None = None
    check_track(settings.track)
    options: dict[str, Any] = {
        "workers": chosen_workers(settings.workers),
        "devices": None if settings.device is None else settings.device.split(","),
        "profile": settings.profile,
    }
    with (
        cluster_at(settings.ray, settings.device) as cluster,
        _live(output, settings.track, config, out) as (hooks, newest),
    ):
        options |= {"cluster": cluster, "hooks": hooks}
        with suppress(KeyboardInterrupt):
            if settings.resume is None:
                state = train_ppo(config, out, overwrite=settings.overwrite, **options)
            else:
                state = resume_ppo(out, rounds=settings.rounds, **options)
            done, best = state.round, state.best
    _conclude(output, out, done, config.rounds, best)
    scores = {name: newest.get(name) for name in ("return", "val_score", "params")}
    found = None if best is None else {**asdict(best), "policy": str(out / BEST_POLICY)}
    rounds = {"rounds": done, "rounds_wanted": config.rounds}
    output.json({"out": str(out), **rounds, "best": found, **scores})


def _config_and_folder(settings: PPOSettings) -> "tuple[TrainingConfig, Path]":
    from esper.api import config_of
    from esper.simic.training.config import load_config

    if settings.resume is not None:
        _refuse_changes(settings)
        out = Path(settings.resume)
        return config_of(out, settings.rounds), out
    config = load_config(settings.config, settings.given())
    name = (config.family or config.task).replace(":", "-")
    return config, Path(settings.out or f"runs/ppo-{name}-{config.key}")


@contextmanager
def _live(
    output: Output, track: str | None, config: "TrainingConfig", out: Path
) -> "Iterator[tuple[Hooks, dict[str, Any]]]":
    """Hooks that show progress, track it and end the run on Ctrl-C; and the newest metrics."""
    from esper.api import episode_steps
    from esper.observatory.terminal import RoundProgress
    from esper.simic.training.loop import Hooks
    from esper.trackers import row_scalars

    steps, newest = episode_steps(config), dict[str, Any]()
    tracker = None if track is None else open_tracker(track, out, "policy", config.flat())
    with (
        nullcontext() if tracker is None else closing(tracker),
        Interrupts(output.progress) as interrupts,
        RoundProgress(output.progress, config.rounds, steps) as show,
    ):

        def on_step(step: int) -> None:
            show.step(step)
            interrupts.after_step()

        def on_round(number: int, row: dict[str, Any], timings: dict[str, Any]) -> None:
            show.round(number, row, timings)
            newest.update(row)
            if tracker is not None:
                tracker.scalars(row_scalars(row), number)

        yield Hooks(on_round, on_step, interrupts.after_round), newest


def chosen_workers(given: str | None) -> Workers:
    if given is None or given == "auto":
        return given  # type: ignore[return-value]
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"workers must be auto or a whole number from 1, got {given!r}")
    return int(given)


class Interrupts:
    """Counts Ctrl-C: after the first one the run ends after the round, after the second after the
    step."""

    def __init__(self, console: "Console") -> None:
        self.console, self.count = console, 0

    def __enter__(self) -> "Interrupts":
        # SIGTERM calls the same handler.
        self.before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _note(self, number: int, frame: object) -> None:
        self.count += 1
        if self.count == 1:
            self.console.print("finishing the round; press Ctrl-C again to stop now")

    def after_round(self) -> bool:
        return self.count > 0

    def after_step(self) -> None:
        if self.count > 1:
            raise KeyboardInterrupt


def _refuse_changes(settings: PPOSettings) -> None:
    """A resumed run has the settings it was started with; only `rounds` may change."""
    given = [*settings.given(), *(n for n in ("config", "out") if getattr(settings, n) is not None)]
    if settings.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one of them")
    changed = [name for name in given if name != "rounds"]
    if changed:
        raise ConfigError(f"--resume uses the settings of the run; leave out {', '.join(changed)}")


def _conclude(
    output: Output, out: Path, done: int | None, rounds: int, best: "BestPolicy | None"
) -> None:
    folder = shlex.quote(str(out))
    if best is not None:
        after = "round" if best.round == 1 else "rounds"
        output.say(f"best on validation hosts: {best.score:.2f}, after {best.round} {after}")
    reached = "stopped within a round" if done is None else f"{done} rounds"
    if done is None or done < rounds:
        output.say(f"{reached}; continue with esper train ppo --resume {folder}", whole=True)
    else:
        policy = folder if best is None else shlex.quote(str(out / BEST_POLICY))
        output.say(f"{reached}; use the policy with esper grow --controller {policy}", whole=True)


@dataclass(frozen=True)
class ABSettings:
    rewards: str = option("objective,shaped", "The two reward modes, separated by a comma.")
    keys: int = option(6, "Paired keys: a policy with each reward is trained on each.", min=2)
    first_key: int = option(0, "The first key; the others follow.", min=0, max=MOST_KEY - 10_000)
    hosts: int = option(16, "New hosts on which each policy is scored.", min=1, max=MOST_ENVS)
    task: str | None = setting("task", "What the hosts learn; default digits.")
    family: str | None = setting(
        "family", "Draw hosts from this family, and score on its validation hosts."
    )
    rounds: int | None = setting("rounds", "Rounds of each policy.", min=1, max=MOST_COUNT)
    envs: int | None = setting("envs", "Host trainings per round.", min=1, max=MOST_ENVS)
    group: int | None = setting("group", "Environments with the same host and data.", min=1)
    network: str | None = setting("network.kind", "flat, or set.")
    config: str | None = option(None, "TOML file with settings of both; flags override it.")
    out: str | None = option(None, "Folder for all runs. Default: runs/ab-TASK.")
    resume: bool = option(False, "Continue a comparison that was stopped or killed.")
    workers: str | None = option(None, "Processes that train hosts, or auto.")
    growth: Mapping[str, Any] = growth_options(without=NOT_FOR_TRAINING)


def ab(output: Output, settings: ABSettings) -> None:
    """Compare two rewards: train a policy with each on the same keys, and compare their scores.

    Prints the scores by key, their difference with its 95 % interval, and a verdict. Returns of
    different rewards are not comparable and not compared.

    Example:

      esper train ab --rewards objective,shaped --keys 6 --rounds 100 --out runs/ab
    """
    from esper.api import compare_rewards
    from esper.simic.training.config import load_config

    modes = [mode.strip() for mode in settings.rewards.split(",")]
    if len(modes) != 2:
        raise ConfigError(f"rewards must be two modes separated by a comma, got {modes}")
    given = given_settings(settings)
    first, second = (load_config(settings.config, {**given, "reward_mode": m}) for m in modes)
    out = Path(settings.out or f"runs/ab-{(first.family or first.task).replace(':', '-')}")

    def on_policy(reward: str, key: int, score: float) -> None:
        output.note(f"{reward}, key {key}: {score:.2f}")

    found = compare_rewards(
        first,
        second,
        out,
        keys=range(settings.first_key, settings.first_key + settings.keys),
        hosts=settings.hosts,
        resume=settings.resume,
        workers=chosen_workers(settings.workers),
        on_policy=on_policy,
    )
    gap, known = found.difference, found.difference.low is not None
    interval = f", 95 % interval {gap.low:.2f} to {gap.high:.2f}" if known else ""
    output.say(f"{modes[0]} - {modes[1]}: {gap.mean:+.2f}{interval}, {gap.n} keys")
    output.say(found.verdict)
    output.json({"out": str(out), **found.as_dict()})
