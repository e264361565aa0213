"""Learn from episodes, from Python: record them, imitate a controller, learn offline.

Each leaves the folder of a run: the episodes, or a policy that `find_controller` and `--warm-start`
take. Everything that can be wrong is found before the first episode; raises EsperError.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from esper.api.checks import NETWORK_KIND, checked
from esper.api.controllers import find_controller
from esper.api.training import one_thread
from esper.growth import default_catalogue
from esper.leyline import ConfigError
from esper.observatory import RunDirectory
from esper.simic.agent.network import Kind
from esper.simic.lessons import (
    CloningConfig,
    CloningReport,
    Episodes,
    OfflineConfig,
    OfflineReport,
    clone,
    join,
    load_episodes,
    record_episodes,
    save_episodes,
)
from esper.simic.lessons import learn_offline as learn
from esper.simic.training import (
    TrainingConfig,
    TrainState,
    load_config,
    new_state,
    save_checkpoint,
    space_of,
)
from esper.tolaria import data_root, find_task

# Told what is under way, how much of it is done, and of how much.
Progress = Callable[[str, int, int], None]


def _silent(phase: str, done: int, total: int) -> None:
    pass


@checked(network=NETWORK_KIND)
def record(
    controller: str,
    *,
    out: str | Path,
    task: str = "digits",
    episodes: int = 64,
    steps: int | None = None,
    network: Kind = "flat",
    key: int = 0,
    overwrite: bool = False,
    progress: Progress = _silent,
) -> Episodes:
    """Episodes of a controller on a task's hosts, rewarded as PPO is by default; `network` is the
    kind of policy, flat or set, that is to learn from them."""
    settings: dict[str, Any] = {"controller": controller, "task": task, "key": key}
    settings |= {"episodes": episodes, "steps": steps, "network": network}
    with one_thread():
        play = _player(**settings)
        with _folder(out, overwrite, command="record", **settings) as run:
            return play(run, progress)


@checked(network=NETWORK_KIND)
def imitate(
    teacher: str,
    *,
    out: str | Path,
    task: str = "digits",
    episodes: int = 64,
    steps: int | None = None,
    epochs: int = 60,
    network: Kind = "flat",
    key: int = 0,
    overwrite: bool = False,
    progress: Progress = _silent,
) -> tuple[Episodes, CloningReport]:
    """A policy, flat or set, that does what `teacher` did in episodes that are recorded for it."""
    config = CloningConfig(epochs=epochs)
    settings: dict[str, Any] = {"controller": teacher, "task": task, "key": key}
    settings |= {"episodes": episodes, "steps": steps, "network": network}
    with one_thread():
        play, state = _player(**settings), _fresh_state(task, key, network)
        with _folder(out, overwrite, command="imitate", **settings) as run:
            lessons = play(run, progress)
            learnt = partial(progress, "learning")
            report = clone(state.agent.network, state.observations, lessons, config, key, learnt)
            row = asdict(report)
            agreement = row.pop("held_out")
            row |= {f"agreement.{name}": value for name, value in agreement.items()}
            run.metrics({"kind": "imitation", **row})
            save_checkpoint(run.path, state, run.sync())
    return lessons, report


@checked()
def learn_offline(
    runs: Sequence[str | Path],
    *,
    out: str | Path,
    task: str = "digits",
    expectile: float = 0.9,
    beta: float = 5.0,
    key: int = 0,
    overwrite: bool = False,
    progress: Progress = _silent,
) -> tuple[Episodes, OfflineReport]:
    """A policy from the recorded episodes of `runs` alone, by implicit Q-learning."""
    config = OfflineConfig(expectile=expectile, beta=beta)
    names = ", ".join(map(str, runs))
    with one_thread():
        lessons = join([load_episodes(run) for run in runs])
        state = _fresh_state(task, key, lessons.space.kind)
        if lessons.space != state.space:
            raise ConfigError(
                f"the episodes of {names} are of other slots or blueprints than those of "
                f"task {task!r}"
            )
        settings = {"task": task, "key": key, "expectile": expectile, "beta": beta}
        with _folder(out, overwrite, command="offline", episodes=names, **settings) as run:
            learnt = partial(progress, "learning")
            report = learn(state.agent.network, state.observations, lessons, config, key, learnt)
            run.metrics({"kind": "offline", **asdict(report)})
            save_checkpoint(run.path, state, run.sync())
    return lessons, report


def _folder(out: str | Path, overwrite: bool, **settings: Any) -> RunDirectory:
    return RunDirectory.create(Path(out), settings, overwrite=overwrite)


def _player(
    controller: str, task: str, episodes: int, steps: int | None, network: Kind, key: int
) -> Callable[[RunDirectory, Progress], Episodes]:
    """What records the episodes into a run, once all that it needs has been found."""
    chosen, config = find_task(task), _config(task, key, network)
    who = find_controller(controller, len(chosen.slots), default_catalogue())
    data = chosen.load(data_root())

    def play(run: RunDirectory, progress: Progress) -> Episodes:
        recorded = record_episodes(
            chosen,
            data,
            who,
            episodes=episodes,
            steps=steps,
            key=key,
            reward=config.reward_config(config.reward_mode),
            gamma=config.ppo.gamma,
            network=network,
            recorder=run,
            progress=partial(progress, "recording"),
        )
        save_episodes(run.path, recorded)
        return recorded

    return play


def _config(task: str, key: int, network: Kind) -> TrainingConfig:
    return load_config(None, {"task": task, "key": key, "network.kind": network})


def _fresh_state(task: str, key: int, network: Kind) -> TrainState:
    """An untrained policy with the sizes that PPO uses on the task, so that it can go on."""
    return new_state(_config(task, key, network), space_of(find_task(task), kind=network))
