"""fp16: the loss is scaled, and steps whose gradients overflow are skipped and do no damage."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.leyline import ConfigError, ForgottenCallError
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import make_env, play
from helpers import small_digits

TOO_LARGE = 2.0**40  # every gradient overflows with this scale


def population(train: int = 128) -> LoopedPopulation:
    task, data = small_digits(train)
    return LoopedPopulation(replace(task, precision="fp16").recipe(data), [0])


def set_scale(pop: LoopedPopulation, scale: float) -> None:
    scaler = pop.scalers[0]
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale})


def weights(pop: LoopedPopulation) -> list[Tensor]:
    return [p.detach().clone() for p in pop.networks[0].parameters()]


def test_steps_that_overflow_change_nothing_but_the_scale():
    pop, before = population(), weights(population())
    set_scale(pop, TOO_LARGE)
    found = pop.train_epoch(np.ones(1, dtype=bool), 0)
    assert found.finite.all()
    assert pop.scalers[0].get_scale() == TOO_LARGE / 2**found.batches
    for mine, other in zip(weights(pop), before, strict=True):
        assert torch.equal(mine, other)
    for step in range(1, 20):
        pop.train_epoch(np.ones(1, dtype=bool), step)
    assert any(not torch.equal(a, b) for a, b in zip(weights(pop), before, strict=True))


def test_a_loss_that_overflows_in_some_batches_is_no_damage_and_in_all_of_them_it_is():
    task, data = small_digits()
    for huge, finite in ((slice(0, 1), True), (slice(0, None), False)):
        train_x = data.train_x.clone()
        train_x[huge] = 1e38
        recipe = replace(task, precision="fp16").recipe(replace(data, train_x=train_x))
        found = LoopedPopulation(recipe, [0]).train_epoch(np.ones(1, dtype=bool), 0)
        assert bool(found.finite[0]) == finite


def test_the_scale_is_saved_and_restored_with_its_host():
    pop = population()
    set_scale(pop, 1024.0)
    pop.train_epoch(np.ones(1, dtype=bool), 0)
    saved = pop.snapshot(np.array([0]))
    set_scale(pop, 1.0)
    pop.restore(np.array([0]), saved)
    assert pop.scalers[0].get_scale() == 1024.0


def test_the_governor_leaves_a_run_with_overflows_alone():
    task, data = small_digits()
    settings = esper.GrowthSettings(6, precision="fp16")
    env = make_env(task.recipe(data), [0], settings)
    assert isinstance(env.population, LoopedPopulation)
    set_scale(env.population, 2.0**24)
    from esper.api.callbacks import find_controller

    play(env, find_controller("scripted:early", len(task.slots)))
    assert env.garden.counts["rollbacks"].sum() == 0
    assert env.garden.counts["germinated"].sum() > 0
    assert np.isfinite(env.table.gradient_norm[env.table.holds_seed]).any()


def test_parameters_in_half_precision_are_refused():
    model = nn.Sequential(nn.Linear(4, 2)).half()
    data = [(torch.zeros(2, 4).half(), torch.zeros(2, dtype=torch.long))]
    settings = esper.GrowthSettings(precision="fp16", progress=False)
    with pytest.raises(ConfigError, match="float32"):
        esper.grow(model, data, data, slots=["0"], steps=2, settings=settings)


# --- a user's own loop ---------------------------------------------------------------------------


def attached(**options: Any) -> tuple[esper.Body, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    body = esper.attach(
        model,
        slots=["0"],
        example=torch.zeros(2, 8),
        evaluate=lambda: 50.0,
        steps=8,
        controller="scripted:early",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    body.manage(optimizer)
    return body, model, optimizer


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, batches: int) -> None:
    for _ in range(batches):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(torch.randn(6, 8)), torch.randint(3, (6,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_an_epoch_whose_steps_are_all_skipped_is_an_epoch(fused: bool):
    """A fused optimizer skips a step by itself, others are not called."""
    body, model, optimizer = attached(fused=fused)
    scaler = torch.amp.GradScaler("cpu", TOO_LARGE)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        epoch(model, optimizer, scaler, 3)
        body.step(50.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    norms = []
    for _ in range(6):
        epoch(model, optimizer, scaler, 12)
        norms.append(body.meter.result()["gradient_norm"][0])
        body.step(50.0)
    assert body.finish().rollbacks == 0
    known = [norm for norm in norms if not np.isnan(norm)]
    # Those of the loss itself, whatever its scale.
    assert known
    assert all(0.0 < norm < 10.0 for norm in known)


def test_an_epoch_without_a_step_and_without_overflow_is_a_mistake():
    body, model, _ = attached()
    model(torch.randn(6, 8)).sum().backward()
    with pytest.raises(ForgottenCallError, match="GradScaler"):
        body.step(50.0)
