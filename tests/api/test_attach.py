from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import lr_scheduler as lr

import esper
from architectures import MLP
from esper.growth import keyed, largest_difference
from esper.leyline import ConfigError, ForgottenCallError


class Loop:
    """A training loop as a user writes it, around a model that may grow."""

    def __init__(self, **settings: Any) -> None:
        with keyed(0):
            self.model = MLP()
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
        self.body = esper.attach(self.model, **{**arguments, **settings})

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


def test_a_whole_life_in_a_loop_of_ones_own() -> None:
    loop = Loop()
    loop.body.manage(loop.optimizer)
    scheduler = lr.CosineAnnealingLR(loop.optimizer, 20)
    growing = True
    epochs = 0
    while growing:
        loop.epoch()
        scheduler.step()
        growing = loop.body.step(loop.accuracy())
        epochs += 1
    assert epochs == 15
    stages = [row["layer1.stage"] for row in loop.body.history]
    assert {"TRAINING", "BLENDING", "HOLDING"} <= set(stages)
    contributions = [row["layer1.contribution"] for row in loop.body.history]
    assert any(value is not None for value in contributions)
    assert all(row["train_loss"] is None for row in loop.body.history), "unmeasured is absent"
    outcome = loop.body.finish()
    assert outcome.val_score == pytest.approx(loop.accuracy())
    assert outcome.val_score >= max(row["val_score"] for row in loop.body.history) - 1e-4
    plain = loop.body.export()
    assert largest_difference(plain, loop.body.model, loop.x[:3]) <= 1e-5
    loop.epoch()
    assert loop.body.step(50.0) is False, "the model trains on but grows no more"


def test_a_scheduler_from_before_can_be_given() -> None:
    loop = Loop()
    scheduler = lr.StepLR(loop.optimizer, 1, 0.5)
    with pytest.raises(ConfigError, match=r"manage\(optimizer, scheduler\)"):
        loop.body.manage(loop.optimizer)
    loop = Loop()
    scheduler = lr.StepLR(loop.optimizer, 1, 0.5)
    loop.body.manage(loop.optimizer, scheduler)
    for _ in range(6):
        loop.epoch()
        scheduler.step()
        loop.body.step(loop.accuracy())
    assert {g["lr"] for g in loop.optimizer.param_groups} == {3e-3 * 0.5**6}


def test_a_broken_epoch_is_undone() -> None:
    loop = Loop()
    loop.body.manage(loop.optimizer)
    for _ in range(3):
        loop.epoch()
        loop.body.step(loop.accuracy())
    healthy = {n: t.clone() for n, t in loop.model.state_dict().items()}
    loop.epoch()
    with torch.no_grad():
        loop.model.layer1.weight.fill_(torch.nan)
    loop.body.step(loop.accuracy(), validation_loss=float("nan"))
    assert all(torch.equal(t, healthy[n]) for n, t in loop.model.state_dict().items())
    loop.epoch()
    loop.body.step(loop.accuracy())


def test_forgetting_to_manage_fails_loudly() -> None:
    loop = Loop()
    loop.epoch()
    with pytest.raises(ForgottenCallError, match=r"body\.manage"):
        loop.body.step(loop.accuracy())


def test_training_with_another_optimiser_fails_loudly() -> None:
    loop = Loop()
    loop.body.manage(loop.optimizer)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=3e-3)
    loop.epoch()
    with pytest.raises(ForgottenCallError, match="another optimiser"):
        loop.body.step(loop.accuracy())


def test_never_calling_step_fails_loudly() -> None:
    loop = Loop()
    loop.body.manage(loop.optimizer)
    for _ in range(21):
        loop.epoch()
        loop.accuracy()
    with pytest.raises(ForgottenCallError, match="evaluated 21 times without"):
        loop.epoch()
    loop = Loop()
    loop.body.manage(loop.optimizer)
    loop.epoch()
    for call in (loop.body.finish, loop.body.export):
        with pytest.raises(ForgottenCallError, match="never called"):
            call()


def test_training_a_copy_of_the_model_fails_loudly() -> None:
    loop = Loop()
    loop.body.manage(loop.optimizer)
    loop.epoch()
    loop.body.step(loop.accuracy())
    loop.epoch()
    loop.body.step(loop.accuracy())
    stale = MLP()
    loop.epoch(stale)
    with pytest.raises(ForgottenCallError, match="got no gradient"):
        loop.body.step(loop.accuracy())


def test_an_optimiser_of_another_model_is_refused() -> None:
    loop = Loop()
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        loop.body.manage(torch.optim.SGD(MLP().parameters(), lr=0.1))
    loop.body.manage(loop.optimizer)
    with pytest.raises(ConfigError, match="managed already"):
        loop.body.manage(loop.optimizer)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="no module 'x'"):
        Loop(slots=["x"])
    with pytest.raises(ConfigError, match="steps must be a whole number"):
        Loop(steps=0)
