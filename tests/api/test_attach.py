import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler as lr

from architectures import MLP
from esper.growth.export import largest_difference
from esper.leyline import IS_BLENDED, ConfigError, ForgottenCallError
from esper.leyline.events import GovernorRollback
from esper.tamiyo.controllers.scripted import ScriptedController
from loop_support import Loop


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
    assert epochs == 14
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
    assert loop.body.step(50.0) is False, "nothing is compared after the end"
    assert loop.body.outcome == outcome


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


def test_the_host_of_a_body_can_be_cooled_and_a_rollback_undoes_it() -> None:
    loop = Loop()
    loop.body.manage(loop.optimizer)
    loop.epoch()
    host, envs = loop.body.host, np.array([0])
    loop.body.model.eval()
    saved, before = host.snapshot(envs), loop.body.model(loop.x).detach()
    assert host.cool(0, 0.25) is None
    assert torch.equal(loop.body.model(loop.x), 0.25 * before)
    host.restore(envs, saved)
    assert torch.equal(loop.body.model(loop.x), before)


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


def test_training_with_another_optimizer_fails_loudly() -> None:
    loop = Loop()
    loop.body.manage(loop.optimizer)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=3e-3)
    loop.epoch()
    with pytest.raises(ForgottenCallError, match="another optimizer"):
        loop.body.step(loop.accuracy())


def test_never_calling_step_fails_loudly() -> None:
    loop = Loop()
    loop.body.manage(loop.optimizer)
    loop.epoch()
    for call in (loop.body.finish, loop.body.export):
        with pytest.raises(ForgottenCallError, match="never called"):
            call()
    with pytest.raises(ForgottenCallError, match="never called"), loop.body:
        loop.epoch()


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


def test_an_optimizer_of_another_model_is_refused() -> None:
    loop = Loop()
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        loop.body.manage(torch.optim.SGD(MLP().parameters(), lr=0.1))
    loop.body.manage(loop.optimizer)
    with pytest.raises(ConfigError, match="managed already"):
        loop.body.manage(loop.optimizer)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="no module 'x'"):
        Loop(slots=["x"])
    with pytest.raises(ConfigError, match="at least 2 epochs"):
        Loop(steps=1)


def test_training_beyond_the_last_step_is_not_thrown_away() -> None:
    loop = Loop(steps=3, controller="static")
    loop.body.manage(loop.optimizer)
    scores = []
    for _ in range(12):
        loop.epoch()
        scores.append(loop.accuracy())
        assert loop.body.step(scores[-1]) is (len(scores) < 3)
    outcome = loop.body.finish()
    assert max(scores[3:]) > max(scores[:3]), "or the test shows nothing"
    assert outcome.val_score == max(scores)
    assert outcome.best_step == scores.index(max(scores)), "epochs count from 0"
    assert outcome.steps == 11
    assert [row["val_score"] for row in loop.body.history] == scores
    assert loop.accuracy() == max(scores)


def test_a_broken_epoch_beyond_the_last_step_is_not_the_best() -> None:
    loop = Loop(steps=3, controller="static")
    loop.body.manage(loop.optimizer)
    for _ in range(3):
        loop.epoch()
        loop.body.step(loop.accuracy())
    loop.epoch()
    with torch.no_grad():
        loop.model.layer1.weight.fill_(torch.nan)
    loop.body.step(100.0, validation_loss=float("nan"))
    assert loop.body.finish().best_step < 3
    assert loop.model.layer1.weight.isfinite().all()


def test_the_culprit_of_a_rollback_is_found_by_measured_scores() -> None:
    """The older of two seeds breaks the network; the younger one is innocent."""
    script = ScriptedController(
        "2 GERMINATE layer1 mlp_small linear\n4 GERMINATE layer2 mlp_small linear", "two"
    )
    loop = Loop(steps=20, controller=script)
    loop.body.manage(loop.optimizer)
    table = loop.body.env.table
    while not IS_BLENDED[table.stage[0]].all():
        loop.epoch()
        loop.body.step(loop.accuracy())
    loop.epoch()
    with torch.no_grad():
        for parameter in loop.body.model.seed_parameters(0):
            parameter.fill_(torch.nan)
    loop.body.step(loop.accuracy(), validation_loss=float("nan"))
    (rollback,) = (e for e in loop.body.recorder.events if isinstance(e, GovernorRollback))
    assert rollback.culprit_modules == ("layer1",)


def ratios(clip: float | None, parts: int = 1, scale: float = 1.0) -> list[float]:
    """Gradient ratios of a loop that clips the model's own gradients, adds up those of `parts` of a
    batch and scales the loss."""
    loop = Loop(evaluate=lambda: 50.0)
    loop.model.eval()  # without dropout
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.0)
    loop.body.manage(loop.optimizer)
    for _ in range(9):
        for rows in torch.arange(80).split(20):
            loop.optimizer.zero_grad()
            for part in rows.split(20 // parts):
                loss = F.cross_entropy(loop.model(loop.x[part]), loop.y[part])
                (loss * scale / parts).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), clip)
            loop.optimizer.step()
        loop.body.step(50.0)
    found = [row["layer1.gradient_ratio"] for row in loop.body.history]
    return [ratio for ratio in found if ratio is not None]


def test_gradients_are_read_before_the_loop_clips_them() -> None:
    as_they_are = ratios(clip=None)
    assert min(as_they_are) > 0.0
    assert ratios(clip=1e-3) == as_they_are
    assert ratios(clip=1e-3, parts=2, scale=128.0) == pytest.approx(as_they_are, rel=1e-4)
