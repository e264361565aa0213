from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim import lr_scheduler as lr

from esper.growth.optimizer import (
    add_slot_groups,
    few_groups,
    scaled_rates,
    slot_groups,
    sync_slot_group,
)
from esper.leyline import ConfigError, SeedStage
from helpers import OPTIMIZERS, plant, step, wrap

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr.StepLR(o, 2, 0.5),
    "multistep": lambda o: lr.MultiStepLR(o, [1, 3], 0.5),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 6),
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: lr.LambdaLR(o, lambda epoch: 0.8**epoch),
    "exponential": lambda o: lr.ExponentialLR(o, 0.9),
    "one cycle": lambda o: lr.OneCycleLR(o, max_lr=0.2, total_steps=10),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.ConstantLR(o, 0.5, 2), lr.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_new_parameters_join_and_leave_without_touching_the_old(name: str) -> None:
    network, x = wrap("cnn")
    optimizer = OPTIMIZERS[name](network.host_parameters())
    add_slot_groups(optimizer, network.slot_config.slot_ids)
    step(network, optimizer, x)
    host_state = {
        id(p): {k: v.clone() for k, v in optimizer.state[p].items() if torch.is_tensor(v)}
        for p in network.host_parameters()
    }
    plant(network, 1, "conv_light", SeedStage.TRAINING, 0.0)
    seed = network.seed_parameters(1)
    sync_slot_group(optimizer, "r0c1", seed)
    for p in network.host_parameters():
        for key, value in host_state[id(p)].items():
            assert torch.equal(optimizer.state[p][key], value)
    assert not any(p in optimizer.state for p in seed), "a seed's state starts fresh"
    before = [p.detach().clone() for p in seed]
    step(network, optimizer, x)
    assert all(not torch.equal(p, b) for p, b in zip(seed, before, strict=True))
    network.remove(1)
    sync_slot_group(optimizer, "r0c1", [])
    (group,) = slot_groups(optimizer, "r0c1")
    assert group["params"] == []
    assert not any(p in optimizer.state for p in seed)
    step(network, optimizer, x)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("made", ["before", "after"])
def test_schedulers_keep_working_and_seeds_follow_them(name: str, made: str) -> None:
    network, x = wrap("cnn")
    optimizer = SGD(network.host_parameters(), lr=0.1, momentum=0.9)
    alone = SGD(wrap("cnn")[0].host_parameters(), lr=0.1, momentum=0.9)
    expected = SCHEDULERS[name](alone)
    if made == "before":
        scheduler = SCHEDULERS[name](optimizer)
        add_slot_groups(optimizer, network.slot_config.slot_ids, [scheduler])
    else:
        add_slot_groups(optimizer, network.slot_config.slot_ids)
        scheduler = SCHEDULERS[name](optimizer)
    for epoch in range(6):
        if epoch == 2:
            plant(network, 0, "norm", SeedStage.TRAINING, 0.0)
            sync_slot_group(optimizer, "r0c0", network.seed_parameters(0))
        if epoch == 4:
            network.remove(0)
            sync_slot_group(optimizer, "r0c0", [])
        step(network, optimizer, x)
        alone.step()
        for s in (scheduler, expected):
            s.step(1.0) if name == "plateau" else s.step()
        rates = {group["lr"] for group in optimizer.param_groups}
        assert rates == {alone.param_groups[0]["lr"]}


def test_what_cannot_work_is_refused() -> None:
    network, _ = wrap("cnn")
    ids = network.slot_config.slot_ids
    with pytest.raises(ConfigError, match="Adagrad cannot take new parameters"):
        add_slot_groups(Adagrad(network.host_parameters()), ids)
    optimizer = SGD(network.host_parameters(), lr=0.1)
    lr.StepLR(optimizer, 2)
    with pytest.raises(ConfigError, match=r"manage\(optimizer, scheduler\)"):
        add_slot_groups(optimizer, ids)
    optimizer = SGD(network.host_parameters(), lr=0.1)
    add_slot_groups(optimizer, ids)
    with pytest.raises(ConfigError, match="already trains"):
        add_slot_groups(optimizer, ids)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_without_the_groups_of_empty_slots_are_the_same(name: str) -> None:
    found = []
    for hidden in (False, True):
        network, x = wrap("cnn")
        optimizer = OPTIMIZERS[name](network.host_parameters())
        add_slot_groups(optimizer, network.slot_config.slot_ids)
        plant(network, 1, "conv_light", SeedStage.BLENDING, 0.4)
        sync_slot_group(optimizer, "r0c1", network.seed_parameters(1))
        if hidden:
            with few_groups(optimizer):
                assert len(optimizer.param_groups) == 1
                step(network, optimizer, x)
        else:
            step(network, optimizer, x)
        assert len(optimizer.param_groups) == 4
        found.append(list(network.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_rates_are_multiplied_inside_and_restored_afterwards() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with scaled_rates(optimizer) as scale:
        for factor in (0.25, 0.5):
            scale(factor)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factor)
    assert optimizer.param_groups[0]["lr"] == 0.1
