"""A small model that grows in depth, with data and training loops of its own."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.grown_module import keyed

EPOCHS = 10
START = esper.Depth("blocks", start=1, when=[0.2, 0.5])
ADD = esper.Depth("blocks", add=2, freeze_host=True)


class Block(nn.Module):
    """BatchNorm and dropout: a state beside the parameters, and noise."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.inner = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.dropout(torch.relu(self.inner(self.norm(x)))))


class Post(Block):
    """Nothing silences it, so it has to be blended in."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x)).tanh()


class Net(nn.Module):
    def __init__(self, n_layers: int = 4, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.n_layers = n_layers
        self.stem = nn.Linear(6, 8)
        self.blocks: Any = nn.ModuleList(block() for _ in range(n_layers))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Named(Net):
    def __init__(self) -> None:
        super().__init__()
        named = ((name, Block()) for name in ("one", "two", "three"))
        self.blocks = nn.Sequential(OrderedDict(named))


def net(n_layers: int = 4, block: type[nn.Module] = Block, key: int = 3) -> Net:
    with keyed(key):
        return Net(n_layers, block)


def rows() -> tuple[Tensor, Tensor]:
    with keyed(1):
        x = torch.randn(90, 6)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The training loader shuffles with a generator of its own."""
    x, y = rows()
    generator = torch.Generator().manual_seed(5)
    return (
        DataLoader(TensorDataset(x[:60], y[:60]), 20, shuffle=True, generator=generator),
        DataLoader(TensorDataset(x[60:], y[60:]), 30),
    )


def grow(model: nn.Module, depth: Any = START, out: Path | None = None, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "steps": EPOCHS,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "settings": esper.GrowthSettings(progress=False, keep_best=False),
        "out": out,
        "resume": out is not None,
    }
    return esper.grow(model, *loaders(), depth=depth, **given | changes)


class Loop:
    """A training loop as a user writes it, with a group for weights and one for the others."""

    def __init__(self, model: nn.Module, depth: Any = START, **changes: Any) -> None:
        self.model, (self.x, self.y) = model, rows()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        given = {"example": self.x[:4], "evaluate": self.score, "steps": EPOCHS}
        self.body = esper.attach(model, depth=depth, **given | changes)

    def manage(self) -> "Loop":
        self.body.manage(self.optimizer)
        return self

    def score(self) -> float:
        """More blocks are better, so that all are kept."""
        self.model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(self.model(self.x[60:]), self.y[60:])
        self.model.train()
        return len(self.model.blocks) - float(loss)

    def epochs(self, first: int, last: int, call: Any = None) -> "Loop":
        """Noise and order depend on the number of the epoch alone."""
        call = self.model if call is None else call
        for epoch in range(first, last):
            torch.manual_seed(epoch)
            for batch in torch.randperm(60).split(20):
                self.optimizer.zero_grad()
                F.cross_entropy(call(self.x[batch]), self.y[batch]).backward()
                self.optimizer.step()
            self.body.step(self.score())
        return self
