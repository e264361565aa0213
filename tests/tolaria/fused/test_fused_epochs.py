"""An epoch of the fused population is the looped one's, to rounding."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from fused_support import adopt, assert_epochs_equal, largest_gap, pair, plant, recipe, shake
from torch import Tensor, nn
from torch.optim import AdamW

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.lifecycle import GATED
from esper.leyline import BLEND_NAMES, SeedStage
from esper.tolaria.engine.objectives import LOSSES, SCORES
from helpers import everywhere, fitting

STAGES = {
    SeedStage.GERMINATED: 0.0,
    SeedStage.TRAINING: 0.0,
    SeedStage.BLENDING: 0.4,
    SeedStage.HOLDING: 1.0,
    SeedStage.FOSSILIZED: 1.0,
}
BLUEPRINTS = [(host, name) for host in ("cnn", "mlp") for name in fitting(host)]


@pytest.mark.parametrize("host", ["cnn", "mlp"])
def test_hosts_alone(host: str) -> None:
    looped, fused = pair(recipe(host), [1, 2, 3])
    assert largest_gap(fused, looped) == 0.0, "the same hosts at birth"
    assert_epochs_equal(looped, fused, epochs=3)
    assert largest_gap(fused, looped) < 1e-4


@pytest.mark.parametrize(("host", "blueprint"), BLUEPRINTS)
def test_every_blueprint_in_every_slot_at_every_stage(host: str, blueprint: str) -> None:
    """Host e has its seeds at stage e, one in every slot."""
    looped, fused = pair(recipe(host), list(range(len(STAGES))))
    for env, (stage, alpha) in enumerate(STAGES.items()):
        for slot in range(3):
            plant((looped, fused), env, slot, blueprint, stage, alpha)
    assert largest_gap(fused, looped) == 0.0, "the same seeds at birth"
    shake(looped)
    assert_epochs_equal(looped, fused)


@pytest.mark.parametrize("blend", range(len(BLEND_NAMES)))
@pytest.mark.parametrize(
    ("host", "blueprint"),
    [("cnn", "conv_light"), ("cnn", "widen_half"), ("mlp", "lora"), ("mlp", "widen_double")],
)
def test_every_blend_of_seeds_and_branches(host: str, blueprint: str, blend: int) -> None:
    """Through their stages: valves open, and leave when the blend is full."""
    looped, fused = both = pair(recipe(host), [1, 2, 3])
    for env, slot, name in ((0, 0, blueprint), (0, 1, "branch"), (1, 2, "branch"), (1, 0, "norm")):
        plant(both, env, slot, name, SeedStage.TRAINING, 0.0, blend)
    plant(both, 2, 1, blueprint, SeedStage.TRAINING, 0.0, 0)
    shake(looped)
    for stage, alpha in ((3, 0.0), (4, 0.0), (4, 0.3), (4, 0.8), (6, 1.0)):
        for population in both:
            for env, slot in ((0, 0), (0, 1), (1, 2), (1, 0), (2, 1)):
                population.set_blend(env, slot, SeedStage(stage), alpha)
        assert_epochs_equal(looped, fused, epochs=1)


def mixed(host: str, **changes: object):  # type: ignore[no-untyped-def]
    """Four hosts with different seeds, at different stages, side by side."""
    both = looped, fused = pair(recipe(host, **changes), [1, 2, 3, 4])  # type: ignore[arg-type]
    names = [*fitting(host, ("residual",))[:3], "widen_double"]
    for env in range(4):
        for slot in range(3 if env != 2 else 0):
            stage = list(STAGES)[(env + slot) % 5]
            name = (
                "branch" if (env, slot) in ((0, 1), (0, 2), (1, 0)) else names[(env + 2 * slot) % 4]
            )
            plant(both, env, slot, name, stage, STAGES[stage], GATED if slot == 1 else 0)
    shake(looped)
    return looped, fused


@pytest.mark.parametrize("host", ["cnn", "mlp"])
def test_different_seeds_side_by_side_and_only_some_running(host: str) -> None:
    looped, fused = mixed(host)
    assert_epochs_equal(looped, fused)
    assert_epochs_equal(looped, fused, np.array([True, False, False, True]))
    assert_epochs_equal(looped, fused, np.zeros(4, dtype=bool), epochs=1)


@pytest.mark.parametrize("max_norm", [0.05, 1e-3])
def test_gradients_are_clipped_for_each_host_and_seed_apart(max_norm: float) -> None:
    looped, fused = mixed("cnn", max_grad_norm=max_norm)
    assert_epochs_equal(looped, fused)
    clipped, free = (mixed("cnn", max_grad_norm=norm)[1] for norm in (max_norm, None))
    epochs = [population.train_epoch(np.ones(4, dtype=bool), 0) for population in (clipped, free)]
    assert (epochs[0].loss != epochs[1].loss).all()
    assert np.nanmax(epochs[0].seeds["gradient_norm"]) > max_norm, "read before it is clipped"
    read = looped.train_epoch(np.ones(4, dtype=bool), 5).seeds["gradient_norm"]
    assert np.nanmax(read) > max_norm, "readings are taken before clipping"
    for network in looped.networks:
        for index in range(len(network.sites)):
            grads = [p.grad for p in network.seed_parameters(index) if p.grad is not None]
            assert nn.utils.get_total_norm(grads) <= max_norm * 1.001


def test_other_settings_of_adamw() -> None:
    def optimizer(params):  # type: ignore[no-untyped-def]
        return AdamW(params, lr=3e-3, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.3)

    looped, fused = mixed("cnn", optimizer=optimizer)
    assert_epochs_equal(looped, fused, epochs=3)
    assert largest_gap(fused, looped) < 1e-5


def test_other_objectives_go_through_vmap() -> None:
    made = recipe("mlp")
    one_hot = [
        (x, nn.functional.one_hot(y, 10).float())
        for x, y in (made.data.train, made.data.val)  # type: ignore[attr-defined]
    ]
    data = type(made.data)(*one_hot, batch=64)  # type: ignore[call-arg]
    made = replace(made, data=data, loss=LOSSES["mse"], score=SCORES["negative_mse"])
    looped, fused = pair(made, [1, 2])
    assert_epochs_equal(looped, fused)


def test_short_epochs_and_validation_in_parts() -> None:
    looped, fused = mixed("cnn")
    for population in (looped, fused):
        data = population.recipe.data
        data.max_batches, data.val_batch, data.batch = 2, 30, 40
    assert_epochs_equal(looped, fused)


class Wave(nn.Module):
    """A blueprint that the table of stacked forms does not know."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.full((channels,), 0.1))
        self.inner = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        last = x.movedim(1, -1)
        return (torch.sin(last + self.phase) * self.inner(last)).movedim(-1, 1)


def hooked(channels: int) -> nn.Module:
    """A known module that a hook changes."""
    module = nn.Sequential(nn.GroupNorm(1, channels), nn.ReLU())
    module[0].register_forward_hook(lambda module, args, output: 2.0 * output)
    return module


@pytest.mark.parametrize("make", [Wave, hooked])
@pytest.mark.parametrize("host", ["cnn", "mlp"])
def test_a_foreign_blueprint_goes_through_vmap(host: str, make: Callable[[int], nn.Module]) -> None:
    catalogue = default_catalogue().with_blueprint(everywhere("foreign", make))
    both = looped, fused = pair(recipe(host, catalogue), [1, 2, 3, 4])
    for env, stage in enumerate(list(STAGES)[1:]):
        plant(both, env, env % 3, "foreign", stage, STAGES[stage])
        plant(both, env, (env + 1) % 3, "norm", stage, STAGES[stage])
    assert_epochs_equal(looped, fused)


def test_free_running_hosts_stay_close() -> None:
    looped, fused = mixed("cnn")
    adopt(fused, looped)
    for step in range(3):
        theirs, ours = (p.train_epoch(np.ones(4, dtype=bool), step) for p in (looped, fused))
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-3)
