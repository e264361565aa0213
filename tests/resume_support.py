"""A run of `grow` on a model of one's own, and processes that are killed anywhere."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.grown_module import keyed
from esper.leyline import BLUEPRINT, OP, LifecycleOp, files
from esper.tamiyo.situation import Situation, wait
from helpers import grow_arguments

EPOCHS = 18


class Own(nn.Module):
    """BatchNorm and dropout: a state beside the parameters, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Remembering:
    """A controller that acts by what it remembers: it plants at its 9th act, whatever it sees."""

    name = "remembering"

    def reset(self, n_envs: int) -> None:
        self.acts = 0

    def state_dict(self) -> dict[str, int]:
        return {"acts": self.acts}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.acts = state["acts"]

    def act(self, situation: Situation) -> np.ndarray:
        self.acts += 1
        actions = wait(1)
        if self.acts == 9:
            actions[0, OP] = LifecycleOp.GERMINATE
            actions[0, BLUEPRINT] = situation.catalogue.index("mlp_small")
        return actions


def own_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The training loader shuffles with a generator of its own."""
    with keyed(1):
        x = torch.randn(90, 6)
        y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    generator = torch.Generator().manual_seed(5)
    return (
        DataLoader(TensorDataset(x[:60], y[:60]), 20, shuffle=True, generator=generator),
        DataLoader(TensorDataset(x[60:], y[60:]), 30),
    )


def own_run(out: Path, **settings: Any) -> esper.Grown:
    with keyed(0):
        model = Own()
    train, val = own_loaders()
    return esper.grow(
        model,
        train,
        val,
        **grow_arguments(
            **{
                "slots": ["body"],
                "steps": EPOCHS,
                "optimizer": lambda params: torch.optim.AdamW(params, lr=2e-2),
                "scheduler": lambda optimizer: CosineAnnealingLR(optimizer, EPOCHS),
                "out": out,
                "resume": True,
                "progress": False,
                **settings,
            }
        ),
    )


# --- processes that kill themselves --------------------------------------------------------------


def start_child(body: Callable[[], object]) -> int:
    """The id of a forked process that runs `body`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return child


def was_killed(child: int) -> bool:
    """Wait for the end of a child: by a signal, or without an error."""
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run raised an error"
    return os.WIFSIGNALED(status)


def killing(
    count: int,
    call: Callable[..., Any] = lambda *args: None,
    before: Callable[..., Any] = lambda *args: None,
) -> Callable[..., Any]:
    """`call`, but its nth call runs `before` and kills the process by SIGKILL."""
    left = count

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            before(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return counted


def _write_half(path: Path, data: bytes) -> None:
    path.write_bytes(data[: len(data) // 2])


def kill_while_saving(kind: str, count: int) -> None:
    """Die in a checkpoint: 'write', half-way through the nth file, or 'rename', before the nth
    checkpoint gets its name."""
    if kind == "write":
        files._write = killing(count, files._write, _write_half)
    if kind == "rename":
        files.os.rename = killing(count, os.rename)


def kill_in(plan: str, out: Path, **settings: Any) -> bool:
    """Run in a process of its own that dies by SIGKILL: 'batch:7' in the 7th forward pass,
    'epoch:3' between an epoch and its checkpoint, or as in `kill_while_saving`. Gives whether it
    died before its end."""
    kind, count = plan.split(":")[0], int(plan.split(":")[1])

    def run() -> None:
        kill_while_saving(kind, count)
        if kind == "batch":
            Own.forward = killing(count, Own.forward)  # type: ignore[method-assign]
        callback = esper.Callback()
        if kind == "epoch":
            callback.on_epoch = killing(count, callback.on_epoch)  # type: ignore[method-assign]
        own_run(out, callbacks=[callback], **settings)

    return was_killed(start_child(run))
