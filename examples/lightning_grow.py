"""A LightningModule that grows while a Trainer fits it.

Needs: pip install 'esper-grow[digits,lightning]'
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
        self.example_input_array = torch.zeros(2, 64)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_acc", 100.0 * (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]


def main() -> None:
    pl.seed_everything(0, verbose=False)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
    y = torch.tensor(load_digits().target)
    train = DataLoader(TensorDataset(x[:600], y[:600]), 50, shuffle=True)
    val = DataLoader(TensorDataset(x[600:900], y[600:900]), 300)

    grow = esper.lightning.Grow(slots=["net.1"], monitor="val_acc", budget=esper.Budget(params=3.0))
    trainer = pl.Trainer(
        max_epochs=20,
        accelerator="cpu",
        callbacks=[grow, EarlyStopping("val_acc", mode="max", patience=10)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), train, val)

    outcome = grow.body.outcome
    print(
        f"{outcome.val_score:.1f} % with {outcome.params} parameters, {outcome.host_params} before"
    )
    for seed in outcome.seeds:
        print(f"  {seed.blueprint} in {seed.module}")
    plain = grow.export()  # a module that needs neither Esper nor Lightning
    print(type(plain).__name__, sum(p.numel() for p in plain.parameters()))


if __name__ == "__main__":
    main()
