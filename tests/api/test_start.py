"""Ways to start."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline import ConfigError


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 6, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    data = TensorDataset(x, y)
    shuffled = DataLoader(data, 32, shuffle=True, generator=torch.Generator().manual_seed(1))
    return shuffled, DataLoader(data, 64)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


SETTINGS: dict[str, Any] = {
    "slots": ["1", "3"],
    "settings": esper.GrowthSettings(progress=False),
}


def test_a_trained_model_is_grown_before_its_first_epoch() -> None:
    model = small_model()
    esper.grow(model, *loaders(), controller="static", steps=5, **SETTINGS)
    before = model[0].weight.clone()
    grown = esper.grow(model, *loaders(), start="trained", controller="static", steps=3, **SETTINGS)
    # A look at it as it is, and three epochs.
    assert len(grown.history) == 4
    assert grown.history[0]["train_loss"] is None
    assert not torch.equal(before, model[0].weight) or grown.outcome.best_step == 0


def test_only_fresh_and_trained_are_ways_to_start() -> None:
    with pytest.raises(ConfigError, match="start must be 'fresh' or 'trained', got 'warm'"):
        esper.grow(small_model(), *loaders(), start="warm", **SETTINGS)  # type: ignore[arg-type]
