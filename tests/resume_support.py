"""A run of `grow` on a model of one's own that can be killed anywhere."""

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
from esper.leyline import BLUEPRINT, OP, LifecycleOp, sealed
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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in(plan: str, out: Path, **settings: Any) -> bool:
    """Run in a process of its own that dies by SIGKILL: 'batch:7' in the 7th forward pass,
    'write:2' half-way through the 2nd file of a checkpoint, 'rename:1' before a checkpoint gets its
    name, 'epoch:3' between an epoch and its checkpoint. Gives whether it died before its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _arm(plan, out, settings)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run raised an error"
    return os.WIFSIGNALED(status)


def _arm(plan: str, out: Path, settings: dict[str, Any]) -> None:
    kind, left = plan.split(":")[0], int(plan.split(":")[1])

    def counted(call: Callable[..., Any], before_death: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                before_death(*args)
                die()
            return call(*args, **kwargs)

        return wrapped

    def half(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])

    if kind == "write":
        sealed._write = counted(sealed._write, half)
    if kind == "rename":
        sealed.os.rename = counted(os.rename, lambda *args: None)
    if kind == "batch":
        Own.forward = counted(Own.forward, lambda *args: None)  # type: ignore[method-assign]

    assassin = esper.Callback()
    if kind == "epoch":
        assassin.on_epoch = counted(assassin.on_epoch, lambda row: None)  # type: ignore[method-assign]
    own_run(out, callbacks=[assassin], **settings)
