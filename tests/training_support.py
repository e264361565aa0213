"""A digits task small enough for a round in a fraction of a second, and runs of it."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from esper.api.training import resume_ppo, train_ppo
from esper.growth.hosts import CNNHost
from esper.leyline import BLUEPRINT, OP, SLOT, History, LifecycleOp
from esper.leyline.growth_settings import user_settings
from esper.simic import analytic
from esper.simic.training.checkpoint import load_checkpoint
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.env_specs import ShardSpec
from esper.simic.training.loop import Hooks, run_training
from esper.simic.training.round_log import RoundLog
from esper.simic.training.state import Space, TrainState, new_state, pack
from esper.simic.training.workers import (
    Cluster,
    Reply,
    ShardServer,
    WorkerLostError,
    WorkerPool,
)
from esper.tamiyo.situation import Situation, wait
from esper.tolaria.data.images import load_digits
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.families import digits as digits_hosts
from esper.tolaria.families.base import Family
from esper.tolaria.governor import Governor
from esper.tolaria.tasks import Task, find_task
from resume_support import kill_while_saving, killing, start_child

# Every remedy against noise.
REMEDIES = {"scale_returns": True, "ppo.group_baseline": True}

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


GROWTH = frozenset(name for name, _, _ in user_settings())


def tiny_config(**flags: Any) -> TrainingConfig:
    """Growth settings may be given without their table."""
    sizes = {"network.feature_dim": 16, "network.lstm_hidden_dim": 16}
    own = {f"growth.{name}" if name in GROWTH else name: value for name, value in flags.items()}
    return load_config(flags={"rounds": 3, "envs": 4, "key": 5, **sizes, **own})


def tiny_run(
    out: Path,
    workers: int | None = None,
    devices: Sequence[str] | None = None,
    hooks: Hooks | None = None,
    profile: int | None = None,
    cluster: Cluster | None = None,
    **flags: Any,
) -> TrainState:
    return train_ppo(
        tiny_config(**flags),
        out,
        task=tiny_task(),
        workers=workers,
        devices=devices,
        cluster=cluster,
        profile=profile,
        hooks=hooks,
    )


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


def plant_wherever_possible(situation: Situation) -> np.ndarray:
    """Actions [E, 4] that plant the first blueprint that fits the first empty slot."""
    actions, masks = wait(len(situation.keys)), situation.masks
    for env in np.flatnonzero(masks.op[:, LifecycleOp.GERMINATE]).tolist():
        slot = masks.slot[env, LifecycleOp.GERMINATE].argmax()
        actions[env, [OP, SLOT]] = LifecycleOp.GERMINATE, slot
        actions[env, BLUEPRINT] = masks.blueprint[env, slot].argmax()
    return actions


def break_at_birth(monkeypatch: Any, env: int) -> None:
    """Let the governor give up one host after its warm-up."""
    check = Governor.check

    def panics(self: Any, *arguments: Any) -> Any:
        verdict = check(self, *arguments)
        if not getattr(self, "warm", False):
            self.warm = verdict.panic[env] = verdict.rollback[env] = True
        return verdict

    monkeypatch.setattr(Governor, "check", panics)


class InProcessConnection:
    """A connection to a worker in this process; everything is pickled, as for another process."""

    def __init__(self, spec: ShardSpec) -> None:
        self.server, self.lost = ShardServer(pickle.loads(pickle.dumps(spec))), False

    def send(self, name: str, argument: Any) -> None:
        if not self.lost:
            call = pickle.loads(pickle.dumps((name, argument)))
            self.reply = pickle.dumps(self.server.answer(*call))

    def receive(self) -> Reply:
        if self.lost:
            raise WorkerLostError("lost by the test")
        return pickle.loads(self.reply)

    def close(self) -> None:
        pass


def remember_pools(monkeypatch: Any) -> list[WorkerPool]:
    """Those that are made from now on."""
    pools, make = [], WorkerPool.__init__

    def remember(self: WorkerPool, *args: Any) -> None:
        make(self, *args)
        pools.append(self)

    monkeypatch.setattr(WorkerPool, "__init__", remember)
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


def start_run(run: Path, rounds: int, plan: str = "none", **flags: Any) -> int:
    """The id of a process that begins or resumes a run, and kills itself: 'step:7' in the 7th step,
    or as in `kill_while_saving`."""
    kind, _, count = plan.partition(":")

    def play() -> None:
        hooks = Hooks(on_step=killing(int(count))) if kind == "step" else Hooks()
        if kind in ("write", "rename"):
            kill_while_saving(kind, int(count))
        if (run / "config.toml").exists():
            resume_ppo(run, task=tiny_task(), hooks=hooks)
        else:
            tiny_run(run, rounds=rounds, hooks=hooks, **flags)

    return start_child(play)
