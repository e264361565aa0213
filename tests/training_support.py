"""A digits task small enough for a round in a fraction of a second, and runs of it."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from esper.api.training import resume_ppo, train_ppo
from esper.growth.hosts.cnn import CNNHost
from esper.leyline import History, sealed
from esper.simic import analytic
from esper.simic.training.checkpoint import load_checkpoint
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.env_specs import ShardSpec
from esper.simic.training.loop import Hooks, run_training
from esper.simic.training.round_log import RoundLog
from esper.simic.training.state import Space, TrainState, new_state, pack
from esper.simic.training.workers import Cluster, Workers
from esper.tolaria.data.images import load_digits
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.families import digits as digits_hosts
from esper.tolaria.families.base import Family
from esper.tolaria.tasks import find_task
from esper.tolaria.tasks.base import Task

# Every remedy against noise.
REMEDIES = {
    "scale_returns": True,
    "ppo.group_baseline": True,
}

HISTORY = ("config.toml", "events.jsonl", "metrics.jsonl", "outcomes.jsonl")


def load_few(folder: Path, train: int = 64, val: int = 48) -> DataSplits:
    data = load_digits(folder)
    return replace(
        data,
        train_x=data.train_x[:train],
        train_y=data.train_y[:train],
        val_x=data.val_x[:val],
        val_y=data.val_y[:val],
    )


def tiny_task() -> Task:
    """Everything of it can be sent to another process."""
    return replace(
        find_task("digits"),
        load=load_few,
        build=partial(CNNHost, num_classes=10, n_blocks=2, base_channels=2, in_channels=1),
        slots=("blocks.0", "blocks.1"),
        steps=8,
        batch=32,
    )


def tiny_family(**more: Any) -> Family:
    """Hosts of two blocks, some of them trained, on few examples."""
    settings: dict[str, Any] = {
        "name": "digits:tiny",
        "description": "",
        "task": tiny_task(),
        "build": digits_hosts.host,
        "widths": ((1, 3), (2, 6)),
        "blocks": (2, 2),
        "shares": (0.5, 1.0),
        "starts": ("fresh", "trained"),
        "extras": (0.6,),
        "sizes": {"train": 4, "validation": 2, "test": 2},
        "hosts": 2,
    }
    return Family(**settings | more)


def family_run(out: Path, workers: int | None = None, **flags: Any) -> TrainState:
    """The folder of the data must be one that hosts can be kept in."""
    settings = {"group": 2, "reward_mode": "budget", **flags}
    return train_ppo(tiny_config(**settings), out, family=tiny_family(), workers=workers)


def tiny_spec(config: TrainingConfig, envs: tuple[int, ...], device: str = "cpu") -> ShardSpec:
    task = tiny_task()
    return ShardSpec(config, task, task.load(Path("unused")), envs, device)


def tiny_config(**flags: Any) -> TrainingConfig:
    sizes = {"network.feature_dim": 16, "network.lstm_hidden_dim": 16}
    settings = {"rounds": 3, "envs": 4, "key": 5, **sizes, **flags}
    return load_config(flags=settings)


def tiny_run(
    out: Path,
    workers: int | None = None,
    devices: Sequence[str] | None = None,
    hooks: Hooks | None = None,
    profile: int | None = None,
    cluster: Cluster | None = None,
    **flags: Any,
) -> TrainState:
    how: dict[str, Any] = {"workers": workers, "devices": devices, "hooks": hooks}
    how["cluster"] = cluster
    how["profile"] = profile
    return train_ppo(tiny_config(**flags), out, task=tiny_task(), **how)


ANALYTIC = Space(analytic.OBSERVATION_DIM, analytic.NUM_SLOTS, ("small", "medium", "large"))


class RunHistory(History):
    """The record of a run that leaves nothing on disk: rows know their round."""

    def begin_round(self, number: int) -> None:
        self.round = number

    def metrics(self, row: dict[str, Any]) -> None:
        super().metrics({"round": self.round, **row})

    def timing(self, row: dict[str, Any]) -> None:
        pass

    def sync(self) -> dict[str, int]:
        return {}

    def of(self, kind: str, round_: int | None = None) -> list[dict[str, Any]]:
        """Rows of a kind, of one round or of all."""
        return [r for r in self.rows if r["kind"] == kind and round_ in (None, r["round"])]


def analytic_state(**flags: Any) -> tuple[TrainingConfig, TrainState]:
    config = tiny_config(task="analytic", **flags)
    return config, new_state(config, ANALYTIC)


def play(config: TrainingConfig, state: TrainState) -> RunHistory:
    """The training loop on the analytic problem, which takes no time."""
    history, env = RunHistory(), analytic.AnalyticGrowth(config.envs, config.key)
    run_training(config, state, env, analytic.HORIZON, RoundLog(history))
    return history


def remember_workers(monkeypatch: Any) -> list[Workers]:
    """Those that are made from now on."""
    pools, make = [], Workers.__init__

    def remember(self: Workers, *args: Any) -> None:
        make(self, *args)
        pools.append(self)

    monkeypatch.setattr(Workers, "__init__", remember)
    return pools


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_run(a: Path, b: Path) -> None:
    """Parameters, normalisers, diagnostics and history are the same to the bit."""
    for name in HISTORY:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    (tensors_a, meta_a), (tensors_b, meta_b) = (pack(load_checkpoint(x).state) for x in (a, b))
    assert meta_a == meta_b
    assert tensors_a.keys() == tensors_b.keys()
    for name, tensor in tensors_a.items():
        assert tensor.numpy().tobytes() == tensors_b[name].numpy().tobytes(), name


def die_at(plan: str) -> Hooks:
    """Arrange for this process to kill itself: 'step:7', in the 7th step from now; 'write:2', half
    way through the 2nd file of a checkpoint; 'rename:1', before the 1st one gets its name."""
    kind, _, count = plan.partition(":")
    left = int(count or 0)

    def die_or_count() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write(path: Path, data: bytes) -> None:
        if die_or_count():
            path.write_bytes(data[: len(data) // 2])
            die()
        write_whole(path, data)

    def rename(source: Path, target: Path) -> None:
        if die_or_count():
            die()
        rename_whole(source, target)

    def step(number: int) -> None:
        if die_or_count():
            die()

    write_whole, rename_whole = sealed._write, os.rename
    if kind == "write":
        sealed._write = write
    if kind == "rename":
        sealed.os.rename = rename
    return Hooks(on_step=step) if kind == "step" else Hooks()


def main() -> None:
    """A run in a process of its own: `python -m training_support RUN ROUNDS PLAN SETTINGS`, the
    last as JSON."""
    run, rounds, plan, flags = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    hooks = die_at(plan)
    if (run / "config.toml").exists():
        resume_ppo(run, task=tiny_task(), hooks=hooks)
    else:
        tiny_run(run, rounds=rounds, hooks=hooks, **json.loads(flags))


if __name__ == "__main__":
    main()
