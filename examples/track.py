"""Track a growing network in TensorBoard, Weights & Biases and MLflow, offline.

Needs: pip install 'esper-grow[digits,tensorboard,wandb,mlflow]'
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper


def main() -> None:
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
    labels = torch.tensor(load_digits().target)
    train = DataLoader(TensorDataset(images[:600], labels[:600]), 50, shuffle=True)
    val = DataLoader(TensorDataset(images[600:900], labels[600:900]), 300)
    grown = esper.grow(
        nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10)),
        train,
        val,
        slots=["1"],
        steps=12,
        controller="scripted:early",
        optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
        callbacks=[
            esper.trackers.TensorBoard("logs/tensorboard", "digits"),
            esper.trackers.WandB("logs", "digits"),
            esper.trackers.MLflow("logs/mlflow", "digits"),
        ],
        settings=esper.GrowthSettings(progress=False),
    )
    print(grown)
    print("tensorboard --logdir logs/tensorboard")
    print("wandb sync logs/wandb/offline-run-*")
    print("mlflow ui --backend-store-uri sqlite:///logs/mlflow/mlflow.db")


if __name__ == "__main__":
    main()
