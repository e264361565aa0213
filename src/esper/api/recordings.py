"""Record episodes, imitate a controller, and learn offline, from Python.

Each function writes the folder of a run: with the episodes, or with a policy for `find_controller`
and `--warm-start`. Wrong arguments raise EsperError before the first episode.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from esper.api.callbacks import find_controller
from esper.api.checks import FAMILY_NAME, NETWORK_KIND, checked
from esper.api.training import choose_task, one_thread
from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import ConfigError
from esper.leyline.settings import read_toml
from esper.observatory.run_directory import CONFIG, RunDirectory
from esper.simic.agent.network import Kind
from esper.simic.recordings.episodes import (
    Episodes,
    convert_episodes,
    join,
    load_episodes,
    record_episodes,
    save_episodes,
)
from esper.simic.recordings.imitation import CloningConfig, CloningReport, clone
from esper.simic.recordings.offline import Advantage, OfflineConfig, OfflineReport
from esper.simic.recordings.offline import learn_offline as learn
from esper.simic.training.checkpoint import save_checkpoint
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.env_specs import space_of
from esper.simic.training.state import TrainState, new_state
from esper.tolaria.data.catalogue import data_root

SIDE_BY_SIDE = 64  # hosts of a task that are recorded together

# Called with the name of the phase, how much of it is done, and the total.
Progress = Callable[[str, int, int], None]


def _silent(phase: str, done: int, total: int) -> None:
    pass


@checked(network=NETWORK_KIND, family=FAMILY_NAME)
def record(
    controller: str,
    *,
    out: str | Path,
    task: str = "digits",
    family: str | None = None,
    group: int | None = None,
    episodes: int = 64,
    steps: int | None = None,
    network: Kind | None = None,
    key: int = 0,
    overwrite: bool = False,
    progress: Progress = _silent,
) -> Episodes:
    """Record episodes of a controller on hosts of a task, or of a family, which has its own task.

    Rewards are those of PPO by default. `group` episodes of a family start from the same host.
    `network` is the kind of policy that will learn from them (default: flat, for a family set).
    """
    with one_thread():
        config = _config(task, family, key, network, steps, group)
        play = _player(controller, config, episodes)
        settings = {"controller": controller, "episodes": episodes}
        with _folder(out, overwrite, config, "record", **settings) as run:
            return play(run, progress)


@checked(network=NETWORK_KIND, family=FAMILY_NAME)
def imitate(
    teacher: str,
    *,
    out: str | Path,
    task: str = "digits",
    family: str | None = None,
    group: int | None = None,
    episodes: int = 64,
    steps: int | None = None,
    epochs: int = 60,
    entropy: float = 0.0,
    network: Kind | None = None,
    key: int = 0,
    overwrite: bool = False,
    progress: Progress = _silent,
) -> tuple[Episodes, CloningReport]:
    """Record episodes of the controller `teacher`, as `record` does, and train a policy to imitate
    it. With `entropy`, from 0 to 1, the policy stays random enough for PPO to explore."""
    cloning = CloningConfig(epochs=epochs, entropy=entropy)
    with one_thread():
        config = _config(task, family, key, network, steps, group)
        play, state = _player(teacher, config, episodes), _fresh_state(config)
        settings = {"controller": teacher, "episodes": episodes}
        with _folder(out, overwrite, config, "imitate", **settings) as run:
            recorded = play(run, progress)
            learnt = partial(progress, "learning")
            report = clone(state.agent.network, state.observations, recorded, cloning, key, learnt)
            taught = {"teacher": Path(teacher).name, "episodes": len(recorded)}
            state.settings = _learned(config, "imitation", **taught, **asdict(cloning))
            row = asdict(report)
            agreement = row.pop("held_out")
            row |= {f"agreement.{name}": value for name, value in agreement.items()}
            run.metrics({"kind": "imitation", **row})
            save_checkpoint(run.path, state, run.sync())
    return recorded, report


@checked(family=FAMILY_NAME)
def learn_offline(
    runs: Sequence[str | Path],
    *,
    out: str | Path,
    task: str = "digits",
    family: str | None = None,
    advantage: Advantage = "iql",
    expectile: float = 0.9,
    beta: float = 5.0,
    key: int = 0,
    overwrite: bool = False,
    progress: Progress = _silent,
) -> tuple[Episodes, OfflineReport]:
    """Train a policy from the recorded episodes of `runs` alone, by implicit Q-learning.

    With the advantage "group" an episode is compared with those that started from the same host
    instead. With a `beta` of 0 all episodes are imitated equally. They may be of several families,
    if the hosts of `task` or `family` have all their slots and blueprints.
    """
    offline = OfflineConfig(advantage=advantage, expectile=expectile, beta=beta)
    names = ", ".join(map(str, runs))
    with one_thread():
        parts = [load_episodes(run) for run in runs]
        if not parts:
            raise ConfigError("there are no episodes to learn from; name a run that has some")
        config = _config(task, family, key, parts[0].space.kind)
        state = _fresh_state(config)
        recorded = join([convert_episodes(part, state.space) for part in parts])
        settings = {"episodes": names, "advantage": advantage, "expectile": expectile, "beta": beta}
        with _folder(out, overwrite, config, "offline", **settings) as run:
            learnt = partial(progress, "learning")
            report = learn(state.agent.network, state.observations, recorded, offline, key, learnt)
            sources = [_source(Path(one), len(part)) for one, part in zip(runs, parts, strict=True)]
            told = {"recordings": sources, "episodes": len(recorded)}
            state.settings = _learned(config, "offline", **told, **offline.effective())
            run.metrics({"kind": "offline", **asdict(report)})
            save_checkpoint(run.path, state, run.sync())
    return recorded, report


def _config(
    task: str,
    family: str | None,
    key: int,
    network: Kind | None,
    steps: int | None = None,
    group: int | None = None,
) -> TrainingConfig:
    """The defaults of PPO, so that PPO can continue from the policy."""
    given: dict[str, Any] = {
        "key": key,
        "network.kind": network,
        "growth.steps": steps,
        "group": group,
    }
    if family is None:
        given |= {"task": task, "envs": SIDE_BY_SIDE}
    else:
        given |= {"family": family, "envs": group}
    return load_config(None, given)


def _learned(config: TrainingConfig, learning: str, **given: Any) -> dict[str, Any]:
    """The settings of a policy that was learned without PPO: those that had an effect."""
    flat = config.flat()
    kept = {n: flat[n] for n in flat if n.startswith("network.") or n in ("task", "family", "key")}
    known = {name: value for name, value in kept.items() if value is not None}
    return {**known, "learning": learning, **given}


def _source(run: Path, episodes: int) -> dict[str, Any]:
    """What a run says about its recorded episodes, without paths of this machine."""
    told = read_toml(run / CONFIG) if (run / CONFIG).is_file() else {}
    known: dict[str, Any] = {
        name: told[name] for name in ("command", "family", "task", "key") if name in told
    }
    if "controller" in told:
        known["controller"] = Path(str(told["controller"])).name
    return {**known, "episodes": episodes}


def _folder(
    out: str | Path, overwrite: bool, config: TrainingConfig, command: str, **settings: Any
) -> RunDirectory:
    common = {"command": command, "task": config.task, "family": config.family, "key": config.key}
    common |= {"steps": config.growth.steps, "network": config.network.kind}
    return RunDirectory.create(Path(out), common | settings, overwrite=overwrite)


def _player(
    controller: str, config: TrainingConfig, episodes: int
) -> Callable[[RunDirectory, Progress], Episodes]:
    """A function that records the episodes of a run; what it needs is loaded and checked now."""
    task, family = choose_task(config)
    chosen = find_controller(controller, len(task.slots), default_catalogue())
    data = task.load(data_root())

    def play(run: RunDirectory, progress: Progress) -> Episodes:
        recorded = record_episodes(
            config,
            task,
            data,
            chosen,
            episodes=episodes,
            family=family,
            recorder=run,
            progress=partial(progress, "recording"),
        )
        run.sync()  # raises ConfigError if the folder was deleted
        save_episodes(run.path, recorded)
        return recorded

    return play


def _fresh_state(config: TrainingConfig) -> TrainState:
    task, family = choose_task(config)
    return new_state(config, space_of(task, family, kind=config.network.kind))
