"""A training loop as users write them, for tests of `attach`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import esper
from architectures import MLP
from esper.growth.grown_module import keyed
from helpers import grow_arguments


class Loop:
    """A training loop as a user writes it, around a model that may grow."""

    def __init__(self, model: MLP | None = None, **settings: Any) -> None:
        with keyed(0):
            self.model = model or MLP()
            self.y = torch.arange(120) % 5
            self.x = torch.randn(120, 20) + self.y[:, None]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        arguments: dict[str, Any] = {
            "slots": ["layer1", "layer2"],
            "example": self.x[:2],
            "evaluate": self.accuracy,
            "steps": 14,
            "controller": "scripted:early",
        }
        self.body = esper.attach(self.model, **grow_arguments(**{**arguments, **settings}))

    def accuracy(self) -> float:
        self.model.eval()
        with torch.no_grad():
            right = self.model(self.x[80:]).argmax(1) == self.y[80:]
        self.model.train()
        return 100.0 * float(right.float().mean())

    def epoch(self, model: Callable[[Tensor], Tensor] | None = None) -> None:
        for rows in torch.arange(80).split(20):
            self.optimizer.zero_grad()
            F.cross_entropy((model or self.model)(self.x[rows]), self.y[rows]).backward()
            self.optimizer.step()
