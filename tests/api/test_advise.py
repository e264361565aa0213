"""Advice about a model of one's own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth import keyed
from esper.leyline import ConfigError


def spirals(count: int, key: int) -> tuple[Tensor, Tensor]:
    """Points of two classes that a narrow network cannot tell apart well."""
    generator = torch.Generator().manual_seed(key)
    x = torch.randn(count, 6, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def loaders(targets: Callable[[Tensor, Tensor], Tensor] = lambda x, y: y) -> tuple[Any, Any]:
    parts = [spirals(256, 0), spirals(256, 1)]
    train, val = (TensorDataset(x, targets(x, y)) for x, y in parts)
    shuffled = DataLoader(train, 32, shuffle=True, generator=torch.Generator().manual_seed(1))
    return shuffled, DataLoader(val, 64)


def small_model(width: int = 8, outputs: int = 2) -> nn.Sequential:
    with keyed(0):
        return nn.Sequential(
            nn.Linear(6, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )


def fit(model: nn.Module, loader: Any, epochs: int, loss: Any, rate: float = 1e-2) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with keyed(0):
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
    return optimizer


SLOTS = {"slots": ["2", "4"]}
cross_entropy = nn.functional.cross_entropy


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that could change, as values to be compared bit for bit."""
    tensors = [*model.state_dict().items()]
    tensors += [(f"grad {n}", p.grad) for n, p in model.named_parameters() if p.grad is not None]
    tensors += [
        (f"{i} {name}", value)
        for i, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    ]
    hooks = [
        (name, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
        for name, m in model.named_modules()
    ]
    modes = [(name, m.training, type(m).__name__) for name, m in model.named_modules()]
    needs = [p.requires_grad for p in model.parameters()]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    rates = [group["lr"] for group in optimizer.param_groups]
    held = [(name, value.clone().numpy().tobytes()) for name, value in tensors]
    return [held, hooks, modes, needs, groups, rates]


@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(training: bool) -> None:
    model, (train, val) = small_model(), loaders()
    optimizer = fit(model, train, 60, cross_entropy)
    seen = []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    model.train(training)
    model[1].eval()
    model[0].weight.requires_grad_(False)
    before = everything(model, optimizer)
    generator, own = torch.get_rng_state(), train.generator.get_state()
    advice = esper.advise(model, train, val, optimizer=optimizer, epochs=60, **SLOTS)
    assert advice.findings.candidates
    assert everything(model, optimizer) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(train.generator.get_state(), own)


def test_the_same_question_has_the_same_answer() -> None:
    model, (train, val) = small_model(), loaders()
    fit(model, train, 5, cross_entropy)
    first, again = (esper.advise(model, train, val, epochs=5, extra=0.4, **SLOTS) for _ in "12")
    assert first == again


def test_a_network_that_knows_its_data_by_heart_is_to_grow() -> None:
    model, (train, val) = small_model(32), loaders()
    fit(model, train, 150, cross_entropy)
    advice = esper.advise(model, train, val, epochs=150, **SLOTS)
    assert advice.findings.starved
    assert advice.verdict == "grow"
    assert advice.cooled
    assert advice.choice in advice.findings.candidates
    assert advice.share < 0.15


def test_a_network_that_has_just_begun_is_to_continue() -> None:
    model, (train, val) = small_model(32), loaders()
    optimizer = fit(model, train, 1, cross_entropy)
    advice = esper.advise(model, train, val, optimizer=optimizer, epochs=30, **SLOTS)
    assert not advice.findings.starved
    assert not advice.findings.plateaued
    assert advice.verdict == "continue"
    assert advice.choice is None
    assert not advice.cooled


def test_with_much_budget_a_wider_one_is_to_be_trained() -> None:
    model, (train, val) = small_model(), loaders()
    fit(model, train, 3, cross_entropy)
    assert esper.advise(model, train, val, extra=1.0, epochs=3, **SLOTS).verdict == "retrain wider"


def test_regression_has_no_rho() -> None:
    model = small_model(outputs=1)
    train, val = loaders(lambda x, y: x[:, :1] * x[:, 1:2])
    fit(model, train, 3, nn.functional.mse_loss)
    advice = esper.advise(model, train, val, loss="mse", score="negative_mse", **SLOTS)
    assert advice.findings.rho is None
    assert not advice.findings.starved
    assert advice.findings.continued.chance is None
    assert "no classifier" in repr(advice)
    assert advice.as_dict()["findings"]["rho"] is None


class NoCopy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.last = self.layer(torch.zeros(1, 6))  # no leaf, cannot be copied

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Endless:
    """A loader without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loaders()[0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"extra": 0.0}, "extra must be a number above 0, got 0.0"),
        ({"extra": True}, "extra must be a number above 0"),
        ({"extra": 0.01}, "extra=0.01 of 30 epochs is no budget for one more; give 0.034 or more"),
        ({"epochs": 0}, "epochs must be a whole number from 1"),
        ({"slots": ["nothing"]}, "nothing"),
        ({"train_loader": Endless()}, "batches_per_epoch"),
        ({"train_loader": []}, "train_loader is empty"),
        ({"model": NoCopy(), "slots": ["layer"]}, "NoCopy cannot be copied"),
        ({"loss": "mse"}, "loss"),
        ({"key": -1}, "key must be"),
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, Any], words: str) -> None:
    train, val = loaders()
    given = {"model": small_model(), "train_loader": train, "val_loader": val, **SLOTS}
    with pytest.raises(ConfigError, match=words):
        esper.advise(**(given | wrong))
