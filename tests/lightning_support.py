"""A small LightningModule with its data, and the same training as a plain loop."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, TensorDataset

import esper
from architectures import MLP
from esper.growth.grown_module import keyed
from helpers import grow_arguments

EPOCHS, RATE, CLIP = 14, 3e-3, 0.5
SLOTS = ["layer1", "layer2"]


def data() -> tuple[Tensor, Tensor]:
    with keyed(0):
        y = torch.arange(125) % 5
        return torch.randn(125, 20) + 0.5 * y[:, None], y


def loaders() -> tuple[DataLoader, DataLoader]:
    """The last batch of validation is smaller than the others."""
    x, y = data()
    return (
        DataLoader(TensorDataset(x[:80], y[:80]), 20),
        DataLoader(TensorDataset(x[80:], y[80:]), 16),
    )


def net(dropout: float = 0.0) -> MLP:
    with keyed(3):
        model = MLP()
    model.dropout.p = dropout
    return model


class Lit(pl.LightningModule):
    def __init__(self, rate: float = RATE, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = net(dropout)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_acc", 100.0 * (self(x).argmax(1) == y).float().mean())

    def test_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("test_acc", 100.0 * (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        return [optimizer], [lr.CosineAnnealingLR(optimizer, EPOCHS)]


def grower(**changes: Any) -> Any:
    from esper.lightning import Grow

    given: dict[str, Any] = {
        "slots": SLOTS,
        "monitor": "val_acc",
        "example": data()[0][:2],
        "controller": "scripted:early",
    }
    return Grow(**grow_arguments(**given | changes))


def trainer(folder: Any, *callbacks: Any, **changes: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **quiet | changes)


def plain_loop(accumulate: int = 1, dropout: float = 0.0) -> esper.Body:
    """The training that `Lit` gets, written by hand."""
    model, (train, val) = net(dropout), loaders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            right = sum(float((model(x).argmax(1) == y).sum()) for x, y in val)
        model.train()
        return 100.0 * right / 45

    body = esper.attach(
        model,
        slots=SLOTS,
        example=data()[0][:2],
        evaluate=accuracy,
        steps=EPOCHS,
        controller="scripted:early",
    )
    body.manage(optimizer)
    scheduler = lr.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(train):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if (index + 1) % accumulate == 0:
                nn.utils.clip_grad_norm_(body.model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        body.step(accuracy())
        scheduler.step()
    body.finish()
    return body
