"""`esper train record`, `imitate` and `offline`: policies from what others have done."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.cli.options import option

if TYPE_CHECKING:
    from esper.observatory import RunDirectory
    from esper.observatory.terminal import PhaseProgress
    from esper.simic.training.episodes import Episodes
    from esper.simic.training.imitation import CloningReport
    from esper.simic.training.state import TrainState


@dataclass(frozen=True)
class RecordSettings:
    controller: str = option(
        "random", "Who decides: a controller, or the folder of a training run."
    )
    task: str = option("digits", "What the hosts learn; see `esper tasks`.")
    episodes: int = option(64, "How many episodes to record.", min=2)
    steps: int | None = option(None, "Decisions per episode; each task has its default.", min=1)
    key: int = option(0, "Same key, same result.", min=0)
    out: str | None = option(None, "Folder. Default: runs/recorded-TASK-KEY.")
    overwrite: bool = option(False, "Replace a run that is already there.")


@dataclass(frozen=True)
class ImitateSettings(RecordSettings):
    controller: str = option(
        "heuristic",
        "Whom to imitate: a controller, or the folder of a training run.",
        flag="--from",
    )
    out: str | None = option(None, "Folder for the policy. Default: runs/cloned-TASK-KEY.")
    epochs: int = option(60, "Passes over the episodes.", min=1)


@dataclass(frozen=True)
class OfflineSettings:
    episodes: list[str] = option(  # noqa: RUF009
        ..., "Run with recorded episodes; may be given more than once."
    )
    task: str = option("digits", "What the hosts learn; see `esper tasks`.")
    expectile: float = option(0.9, "0.5: as good as the recorder; towards 1: the best it did.")
    beta: float = option(5.0, "How strongly to prefer what was better than usual.")
    key: int = option(0, "Same key, same result.", min=0)
    out: str | None = option(None, "Folder for the policy. Default: runs/offline-TASK-KEY.")
    overwrite: bool = option(False, "Replace a run that is already there.")


def record(settings: RecordSettings) -> None:
    """Record episodes of a controller, to learn from them offline.

    Example: esper train record --controller random --episodes 64 --out runs/recorded
    """
    import torch
    from rich.console import Console

    from esper.observatory import say
    from esper.observatory.terminal import PhaseProgress
    from esper.simic.training.episodes import FILE

    torch.set_num_threads(1)
    console = Console()
    out = Path(settings.out or f"runs/recorded-{settings.task}-{settings.key}")
    with PhaseProgress(console) as bar, _recorded(settings, out, bar) as (episodes, _):
        pass
    say(console, _in_words(episodes))
    say(console, str(out / FILE), whole=True)


def imitate(settings: ImitateSettings) -> None:
    """Learn to do what a controller does: a start for PPO.

    The folder it leaves is that of a policy, with the episodes it was learnt from.

    Examples:

      esper train imitate --from heuristic --task digits --episodes 64 --out runs/cloned

      esper train ppo --warm-start runs/cloned --out runs/warm
    """
    # Everything that can be wrong is found before the first episode.
    import torch
    from rich.console import Console

    from esper.observatory import say
    from esper.observatory.terminal import PhaseProgress
    from esper.simic.training.checkpoint import save_checkpoint
    from esper.simic.training.imitation import CloningConfig, clone

    torch.set_num_threads(1)  # before the first weights: what they are depends on it
    config, console = CloningConfig(epochs=settings.epochs), Console()
    out = Path(settings.out or f"runs/cloned-{settings.task}-{settings.key}")
    state = _fresh_state(settings.task, settings.key)
    with PhaseProgress(console) as bar, _recorded(settings, out, bar) as (episodes, run):
        report = clone(
            state.agent.network,
            state.observations,
            episodes,
            config,
            settings.key,
            partial(bar.show, "learning"),
        )
        run.metrics({"kind": "imitation", **_flat(report)})
        save_checkpoint(run.path, state, run.sync())
    say(console, _in_words(episodes))
    say(console, _agreement_in_words(report))
    say(console, f"policy   {out}", whole=True)


def offline(settings: OfflineSettings) -> None:
    """Learn a policy from recorded episodes alone, by implicit Q-learning.

    Example: esper train offline --episodes runs/recorded --out runs/offline
    """
    import torch
    from rich.console import Console

    from esper.leyline import ConfigError
    from esper.observatory import RunDirectory, say
    from esper.observatory.terminal import PhaseProgress
    from esper.simic.training.checkpoint import save_checkpoint
    from esper.simic.training.episodes import join, load_episodes
    from esper.simic.training.offline import OfflineConfig, learn_offline

    torch.set_num_threads(1)
    config = OfflineConfig(expectile=settings.expectile, beta=settings.beta)
    console, runs = Console(), ", ".join(settings.episodes)
    episodes = join([load_episodes(run) for run in settings.episodes])
    state = _fresh_state(settings.task, settings.key)
    if episodes.space != state.space:
        raise ConfigError(
            f"the episodes of {runs} are of other slots or blueprints than those of "
            f"task {settings.task!r}"
        )
    out = Path(settings.out or f"runs/offline-{settings.task}-{settings.key}")
    told = {"command": "offline", **asdict(settings), "episodes": runs, "out": str(out)}
    with (
        RunDirectory.create(out, told, overwrite=settings.overwrite) as run,
        PhaseProgress(console) as bar,
    ):
        report = learn_offline(
            state.agent.network,
            state.observations,
            episodes,
            config,
            settings.key,
            partial(bar.show, "learning"),
        )
        run.metrics({"kind": "offline", **asdict(report)})
        save_checkpoint(run.path, state, run.sync())
    say(console, _in_words(episodes))
    say(console, f"The weights leave {report.effective_share:.0%} of the steps in play.")
    say(console, f"policy   {out}", whole=True)


def _fresh_state(task: str, key: int) -> "TrainState":
    """An untrained policy with the sizes that PPO uses on the task, so that it can go on."""
    from esper.simic.training.config import load_config
    from esper.simic.training.shard import space_of
    from esper.simic.training.state import new_state
    from esper.tolaria.tasks import find_task

    return new_state(load_config(None, {"task": task, "key": key}), space_of(find_task(task)))


@contextmanager
def _recorded(
    settings: RecordSettings, out: Path, bar: "PhaseProgress"
) -> "Iterator[tuple[Episodes, RunDirectory]]":
    """Episodes of the controller, in a run directory that stays open for what comes of them."""
    from esper.api import find_controller
    from esper.observatory import RunDirectory
    from esper.simic.training.config import load_config
    from esper.simic.training.episodes import record_episodes, save_episodes
    from esper.tolaria.data.catalogue import data_root
    from esper.tolaria.tasks import find_task

    task = find_task(settings.task)
    config = load_config(None, {"task": settings.task, "key": settings.key})
    controller = find_controller(settings.controller)
    data = task.load(data_root())
    told = {"command": "record", **asdict(settings), "out": str(out)}
    with RunDirectory.create(out, told, overwrite=settings.overwrite) as run:
        episodes = record_episodes(
            task,
            data,
            controller,
            episodes=settings.episodes,
            steps=settings.steps,
            key=settings.key,
            reward=config.reward_config(config.reward_mode),
            gamma=config.ppo.gamma,
            recorder=run,
            progress=partial(bar.show, "recording"),
        )
        save_episodes(run.path, episodes)
        yield episodes, run


def _flat(report: "CloningReport") -> dict[str, Any]:
    row = asdict(report)
    agreement = row.pop("held_out")
    return row | {f"agreement.{name}": value for name, value in agreement.items()}


def _in_words(episodes: "Episodes") -> str:
    return (
        f"{len(episodes)} episodes, {int(episodes.lengths.sum())} steps, "
        f"mean return {episodes.returns.mean():+.4f}."
    )


def _agreement_in_words(report: "CloningReport") -> str:
    found = report.held_out
    acting = "" if found.acting is None else f", {found.acting:.1%} where the teacher acts"
    return (
        f"Agreement with the teacher on {found.steps} held-out steps: {found.overall:.1%}{acting} "
        f"(always waiting: {found.always_wait:.1%})."
    )
