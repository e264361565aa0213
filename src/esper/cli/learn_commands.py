"""`esper train record`, `imitate` and `offline`: policies from what others have done."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from esper.cli.options import option
from esper.cli.printing import AS_JSON, QUIET, consoles, print_json, without_printing
from esper.leyline.constants import MOST_COUNT, MOST_ENVS, MOST_KEY

if TYPE_CHECKING:
    from esper.simic.recordings.episodes import Episodes
    from esper.simic.recordings.imitation import CloningReport


@dataclass(frozen=True)
class EpisodeSettings:
    """What recording and imitating have in common."""

    task: str = option("digits", "What the hosts learn; see `esper tasks`.")
    family: str | None = option(None, "Draw hosts from this family, which has a task of its own.")
    group: int | None = option(
        None, "Episodes of a family that begin with the same host; default 8.", min=1, max=MOST_ENVS
    )
    episodes: int = option(64, "How many episodes to record.", min=2, max=MOST_COUNT)
    steps: int | None = option(
        None, "Decisions per episode; each task has its default.", min=1, max=MOST_COUNT
    )
    network: str | None = option(
        None, "Which policy is to learn from them: flat, or set, which fits any slots."
    )
    key: int = option(0, "Same key, same result.", min=0, max=MOST_KEY)
    overwrite: bool = option(False, "Replace a run that is already there.")
    quiet: bool = option(False, QUIET)
    json: bool = option(False, AS_JSON)


@dataclass(frozen=True)
class RecordSettings(EpisodeSettings):
    controller: str = option(
        "random", "Who decides: a controller, or the folder of a training run."
    )
    out: str | None = option(None, "Folder. Default: runs/recorded-TASK-KEY.")


@dataclass(frozen=True)
class ImitateSettings(EpisodeSettings):
    controller: str = option(
        "heuristic",
        "Whom to imitate: a controller, or the folder of a training run.",
        flag="--from",
    )
    out: str | None = option(None, "Folder for the policy. Default: runs/cloned-TASK-KEY.")
    epochs: int = option(60, "Passes over the episodes.", min=1, max=MOST_COUNT)
    entropy: float = option(
        0.0, "Doubts that the policy keeps, from 0 to 1: what PPO can explore from."
    )


@dataclass(frozen=True)
class OfflineSettings:
    episodes: list[str] = option(  # noqa: RUF009
        ..., "Run with recorded episodes; may be given more than once."
    )
    task: str = option("digits", "What the hosts learn; see `esper tasks`.")
    family: str | None = option(None, "The family that the episodes are of.")
    advantage: str = option(
        "iql", "How good an action was: by iql, or against its group, which began alike."
    )
    expectile: float = option(0.9, "0.5: as good as the recorder; towards 1: the best it did.")
    beta: float = option(5.0, "How strongly to prefer what was better than usual; 0: all alike.")
    key: int = option(0, "Same key, same result.", min=0, max=MOST_KEY)
    out: str | None = option(None, "Folder for the policy. Default: runs/offline-TASK-KEY.")
    overwrite: bool = option(False, "Replace a run that is already there.")
    quiet: bool = option(False, QUIET)
    json: bool = option(False, AS_JSON)


def record(settings: RecordSettings) -> None:
    """Record episodes of a controller, to learn from them offline.

    Example: esper train record --controller random --episodes 64 --out runs/recorded
    """
    from esper.api import record
    from esper.observatory.terminal import PhaseProgress, say
    from esper.simic.recordings.episodes import FILE

    out = settings.out or _default("recorded", settings)
    console, result = consoles(settings.quiet, settings.json)
    given = without_printing(replace(settings, out=out))
    with PhaseProgress(console) as bar:
        episodes = record(**given, progress=bar.show)
    say(result, _in_words(episodes))
    if settings.json:
        print_json({"out": out, **_in_numbers(episodes)})
    say(console, f"{out}/{FILE}", whole=True)


def imitate(settings: ImitateSettings) -> None:
    """Learn to do what a controller does: a start for PPO.

    The folder it leaves is that of a policy, with the episodes it was learnt from.

    Examples:

      esper train imitate --from heuristic --task digits --episodes 64 --out runs/cloned

      esper train ppo --warm-start runs/cloned --out runs/warm
    """
    from esper.api import imitate
    from esper.observatory.terminal import PhaseProgress, say

    console, result = consoles(settings.quiet, settings.json)
    out = settings.out or _default("cloned", settings)
    given = without_printing(replace(settings, out=out))
    with PhaseProgress(console) as bar:
        episodes, report = imitate(given.pop("controller"), **given, progress=bar.show)
    say(result, _in_words(episodes))
    say(result, _agreement_in_words(report))
    if settings.json:
        print_json({"out": out, **_in_numbers(episodes), **asdict(report)})
    say(console, f"policy   {out}", whole=True)


def offline(settings: OfflineSettings) -> None:
    """Learn a policy from recorded episodes alone.

    Example: esper train offline --episodes runs/recorded --out runs/offline
    """
    from esper.api import learn_offline
    from esper.observatory.terminal import PhaseProgress, say

    console, result = consoles(settings.quiet, settings.json)
    out = settings.out or _default("offline", settings)
    given = without_printing(replace(settings, out=out))
    with PhaseProgress(console) as bar:
        episodes, report = learn_offline(given.pop("episodes"), **given, progress=bar.show)
    say(result, _in_words(episodes))
    say(result, f"The weights leave {report.effective_share:.0%} of the steps in play.")
    if settings.json:
        print_json({"out": out, **_in_numbers(episodes), **asdict(report)})
    say(console, f"policy   {out}", whole=True)


def _in_numbers(episodes: "Episodes") -> dict[str, Any]:
    return {
        "episodes": len(episodes),
        "steps": int(episodes.lengths.sum()),
        "mean_return": float(episodes.returns.mean()),
    }


def _default(what: str, settings: EpisodeSettings | OfflineSettings) -> str:
    hosts = (settings.family or settings.task).replace(":", "-")
    return f"runs/{what}-{hosts}-{settings.key}"


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
