"""What `esper train record`, `imitate` and `offline` do once their words are understood."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from esper.api import find_controller
from esper.leyline import ConfigError
from esper.observatory.terminal import PhaseProgress
from esper.observatory.training_directory import TrainingDirectory
from esper.simic.lessons.episodes import (
    FILE,
    Episodes,
    join,
    load_episodes,
    record_episodes,
    save_episodes,
)
from esper.simic.lessons.imitation import CloningConfig, CloningReport, clone
from esper.simic.lessons.offline import OfflineConfig, learn_offline
from esper.simic.training.checkpoint import save_checkpoint
from esper.simic.training.config import load_config
from esper.simic.training.shard import space_of
from esper.simic.training.state import TrainState, new_state
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.tasks import find_task


@dataclass(frozen=True)
class Recording:
    """Whose episodes to record, and where to."""

    controller: str
    task: str
    episodes: int
    steps: int | None
    key: int
    out: str
    overwrite: bool


def run_record(recording: Recording) -> None:
    torch.set_num_threads(1)
    console = Console()
    with PhaseProgress(console) as bar:
        episodes, record = _record(recording, bar)
    record.close()
    console.print(_in_words(episodes), highlight=False)
    console.print(str(Path(recording.out) / FILE), highlight=False, soft_wrap=True)


def run_imitate(recording: Recording, epochs: int) -> None:
    """Everything that can be wrong is found before the first episode; raises EsperError."""
    torch.set_num_threads(1)  # before the first weights: what they are depends on it
    config, console = CloningConfig(epochs=epochs), Console()
    state = _fresh_state(recording.task, recording.key)
    with PhaseProgress(console) as bar:
        episodes, record = _record(recording, bar)
        with record:
            report = clone(
                state.agent.network,
                state.observations,
                episodes,
                config,
                recording.key,
                partial(bar.show, "learning"),
            )
            record.metrics({"kind": "imitation", **_flat(report)})
            save_checkpoint(record.path, state, record.sync())
    console.print(_in_words(episodes), highlight=False)
    console.print(_agreement_in_words(report), highlight=False)
    console.print(f"policy   {recording.out}", highlight=False, soft_wrap=True)


def run_offline(
    runs: list[str],
    task: str,
    expectile: float,
    beta: float,
    key: int,
    out: str,
    overwrite: bool,
) -> None:
    torch.set_num_threads(1)
    config, console = OfflineConfig(expectile=expectile, beta=beta), Console()
    episodes = join([load_episodes(run) for run in runs])
    state = _fresh_state(task, key)
    if episodes.space != state.space:
        raise ConfigError(
            f"the episodes of {', '.join(runs)} are of other slots or blueprints than those of "
            f"task {task!r}"
        )
    settings = {"command": "offline", "task": task, "key": key, "episodes": ", ".join(runs)}
    settings |= {"expectile": expectile, "beta": beta}
    with (
        TrainingDirectory.create(Path(out), settings, overwrite=overwrite) as record,
        PhaseProgress(console) as bar,
    ):
        report = learn_offline(
            state.agent.network,
            state.observations,
            episodes,
            config,
            key,
            partial(bar.show, "learning"),
        )
        record.metrics({"kind": "offline", **asdict(report)})
        save_checkpoint(record.path, state, record.sync())
    console.print(_in_words(episodes), highlight=False)
    console.print(
        f"The weights leave {report.effective_share:.0%} of the steps in play.", highlight=False
    )
    console.print(f"policy   {out}", highlight=False, soft_wrap=True)


def _fresh_state(task: str, key: int) -> TrainState:
    """An untrained policy with the sizes that PPO uses on the task, so that it can go on."""
    return new_state(load_config(None, {"task": task, "key": key}), space_of(find_task(task)))


def _record(recording: Recording, bar: PhaseProgress) -> tuple[Episodes, TrainingDirectory]:
    task = find_task(recording.task)
    config = load_config(None, {"task": recording.task, "key": recording.key})
    controller = find_controller(recording.controller)
    data = task.load(data_root())
    settings = {"command": "record", **asdict(recording)}
    record = TrainingDirectory.create(Path(recording.out), settings, overwrite=recording.overwrite)
    episodes = record_episodes(
        task,
        data,
        controller,
        episodes=recording.episodes,
        steps=recording.steps,
        key=recording.key,
        reward=config.reward_config(config.reward_mode),
        gamma=config.ppo.gamma,
        recorder=record,
        progress=partial(bar.show, "recording"),
    )
    save_episodes(record.path, episodes)
    return episodes, record


def _flat(report: CloningReport) -> dict[str, Any]:
    row = asdict(report)
    agreement = row.pop("held_out")
    return row | {f"agreement.{name}": value for name, value in agreement.items()}


def _in_words(episodes: Episodes) -> str:
    return (
        f"{len(episodes)} episodes, {int(episodes.lengths.sum())} steps, "
        f"mean return {episodes.returns.mean():+.4f}."
    )


def _agreement_in_words(report: CloningReport) -> str:
    found = report.held_out
    acting = "" if found.acting is None else f", {found.acting:.1%} where the teacher acts"
    return (
        f"Agreement with the teacher on {found.steps} held-out steps: {found.overall:.1%}{acting} "
        f"(always waiting: {found.always_wait:.1%})."
    )
