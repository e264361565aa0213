"""`esper train record`, `imitate` and `offline`: learn from recorded episodes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from esper.cli.options import option
from esper.cli.printing import Output, advising, same_command
from esper.leyline.constants import MOST_COUNT, MOST_ENVS, MOST_KEY

if TYPE_CHECKING:
    from esper.simic.recordings.episodes import Episodes
    from esper.simic.recordings.imitation import CloningReport


@dataclass(frozen=True)
class EpisodeSettings:
    """The options of both recording and imitating."""

    task: str = option("digits", "What the hosts learn; see `esper tasks`.")
    family: str | None = option(None, "Draw hosts from this family, which has its own task.")
    group: int | None = option(
        None, "Episodes of a family that start from the same host; default 8.", min=1, max=MOST_ENVS
    )
    episodes: int = option(64, "How many episodes to record.", min=2, max=MOST_COUNT)
    steps: int | None = option(
        None, "Decisions per episode; each task has its default.", min=1, max=MOST_COUNT
    )
    network: str | None = option(
        None, "Policy that will learn from them: flat, or set, which fits any slots."
    )
    key: int = option(0, "Random seed: the same key gives the same result.", min=0, max=MOST_KEY)
    overwrite: bool = option(False, "Replace a run that is already there.")


@dataclass(frozen=True)
class RecordSettings(EpisodeSettings):
    controller: str = option("random", "The controller: a name, or the folder of a training run.")
    out: str | None = option(None, "Folder. Default: runs/recorded-TASK-KEY.")


@dataclass(frozen=True)
class ImitateSettings(EpisodeSettings):
    controller: str = option(
        "heuristic",
        "The controller to imitate: a name, or the folder of a training run.",
        flag="--from",
    )
    out: str | None = option(None, "Folder for the policy. Default: runs/cloned-TASK-KEY.")
    epochs: int = option(60, "Passes over the episodes.", min=1, max=MOST_COUNT)
    entropy: float = option(
        0.0, "Entropy that the policy keeps, from 0 to 1, so that PPO can explore."
    )


@dataclass(frozen=True)
class OfflineSettings:
    episodes: list[str] = option(  # noqa: RUF009
        ..., "Run with recorded episodes; may be given more than once."
    )
    task: str = option("digits", "What the hosts learn; see `esper tasks`.")
    family: str | None = option(None, "The family that the episodes are of.")
    advantage: str = option(
        "iql", "How actions are rated: iql, or group (against episodes from the same host)."
    )
    expectile: float = option(0.9, "0.5 learns the mean of the episodes, towards 1 the best.")
    beta: float = option(5.0, "How strongly better actions are preferred; 0 imitates all equally.")
    key: int = option(0, "Random seed: the same key gives the same result.", min=0, max=MOST_KEY)
    out: str | None = option(None, "Folder for the policy. Default: runs/offline-TASK-KEY.")
    overwrite: bool = option(False, "Replace a run that is already there.")


def record(output: Output, settings: RecordSettings) -> None:
    """Record episodes of a controller, to learn from them offline.

    Example: esper train record --controller random --episodes 64 --out runs/recorded
    """
    from esper.api import record
    from esper.simic.recordings.episodes import FILE

    def run(progress: Any, **given: Any) -> Any:
        return record(**given, progress=progress), None

    _run(output, settings, "recorded", run, str, lambda out: f"{out}/{FILE}")


def imitate(output: Output, settings: ImitateSettings) -> None:
    """Train a policy to imitate a controller: a start for PPO.

    The folder holds the policy and the episodes that it was trained on.

    Examples:

      esper train imitate --from heuristic --task digits --episodes 64 --out runs/cloned

      esper train ppo --warm-start runs/cloned --out runs/warm
    """
    from esper.api import imitate

    def run(progress: Any, controller: str, **given: Any) -> Any:
        return imitate(controller, **given, progress=progress)

    _run(output, settings, "cloned", run, _agreement_in_words, lambda out: f"policy   {out}")


def offline(output: Output, settings: OfflineSettings) -> None:
    """Train a policy on recorded episodes alone.

    Example: esper train offline --episodes runs/recorded --out runs/offline
    """
    from esper.api import learn_offline

    def run(progress: Any, episodes: list[str], **given: Any) -> Any:
        return learn_offline(episodes, **given, progress=progress)

    def in_words(report: Any) -> str:
        return f"The weights use {report.effective_share:.0%} of the steps."

    _run(output, settings, "offline", run, in_words, lambda out: f"policy   {out}")


def _run(
    output: Output,
    settings: EpisodeSettings | OfflineSettings,
    name: str,
    run: "Callable[..., tuple[Episodes, Any]]",
    in_words: Callable[[Any], str],
    written: Callable[[str], str],
) -> None:
    """Run a command and print its result: the episodes, the report `in_words`, what was written."""
    from esper.observatory.terminal import PhaseProgress

    hosts = (settings.family or settings.task).replace(":", "-")
    out = settings.out or f"runs/{name}-{hosts}-{settings.key}"  # type: ignore[union-attr]
    advice = f"nothing can be resumed; start again with {same_command('--overwrite')}"
    with advising(output, advice), PhaseProgress(output.progress) as bar:
        episodes, report = run(bar.show, **{**asdict(settings), "out": out})
    steps, mean_return = int(episodes.lengths.sum()), float(episodes.returns.mean())
    output.say(f"{len(episodes)} episodes, {steps} steps, mean return {mean_return:+.4f}.")
    if report is not None:
        output.say(in_words(report))
    numbers = {"episodes": len(episodes), "steps": steps, "mean_return": mean_return}
    output.json({"out": out, **numbers, **({} if report is None else asdict(report))})
    output.note(written(out), whole=True)


def _agreement_in_words(report: "CloningReport") -> str:
    found = report.held_out
    acting = "" if found.acting is None else f", {found.acting:.1%} where the teacher acts"
    return (
        f"Agreement with the teacher on {found.steps} held-out steps: {found.overall:.1%}{acting} "
        f"(always waiting: {found.always_wait:.1%})."
    )
