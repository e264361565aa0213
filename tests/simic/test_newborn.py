"""Parity of young seeds with their hosts: measured on real networks, optional to observe."""

import math

import numpy as np
import pytest
import torch

from esper.leyline import LifecycleOp, SeedStage
from esper.leyline.constants import NEWBORN_EPOCHS
from esper.simic.telemetry import newborn_rows
from esper.tamiyo import FeatureExtractionContext, feature_size, signals_to_features, wait
from reward_support import one_seed, situation, small_env


def grow(blueprint, steps, slot=0):
    env = small_env([5], steps=20)
    state = env.reset()
    history = [state]
    for step in range(steps):
        actions = wait(1)
        if step == 0:
            actions[0] = slot, state.catalogue.index(blueprint), 0, LifecycleOp.GERMINATE
        history.append(env.step(actions).after)
    return env, history


@pytest.mark.parametrize("blueprint", ["mlp_small", "branch"])
def test_activation_ratio_is_that_of_the_seed_and_what_it_is_added_to(blueprint):
    env, history = grow(blueprint, 4)
    network = env.population.networks[0]
    seen = {}
    inputs = torch.cat([x for x, _ in env.population.recipe.data.val_batches()])
    slot = network.slot(0)
    # Before the lifecycle ticked, the last evaluation saw the seed in TRAINING: the host's own.
    network.set_blend(0, SeedStage.TRAINING, 0.0)
    target = network if blueprint == "branch" else network.host.get_submodule(slot.site.module)
    features = network.host.get_submodule(slot.site.module)
    handles = [
        features.register_forward_hook(lambda m, a, out: seen.update(h=out), prepend=True),
        target.register_forward_hook(lambda m, a, out: seen.update(target=out), prepend=True),
    ]
    with torch.no_grad():
        network.eval()
        network(inputs)
        delta = slot.seed(seen["h"])
    for handle in handles:
        handle.remove()
    expected = float(delta.norm() / seen["target"].norm())
    assert history[-1].table.activation_ratio[0, 0] == pytest.approx(expected, rel=1e-4)


def test_parity_is_absent_until_measured():
    _, history = grow("mlp_small", 2)
    assert np.isnan(history[0].table.activation_ratio).all()
    first, second = history[1].table, history[2].table
    # A seed learns from the epoch after its germination on.
    assert first.stage[0, 0] == SeedStage.TRAINING
    assert np.isnan([first.activation_ratio[0, 0], first.gradient_ratio[0, 0]]).all()
    assert second.activation_ratio[0, 0] >= 0
    assert np.isnan(second.activation_ratio[0, 1:]).all()


def test_rows_of_newborns():
    _, history = grow("mlp_small", NEWBORN_EPOCHS + 2)
    counts = [len(newborn_rows(state)) for state in history]
    assert counts == [0] + [1] * NEWBORN_EPOCHS + [0, 0]
    (first,), (second,) = newborn_rows(history[1]), newborn_rows(history[2])
    assert first["gradient_parity"] is first["activation_parity"] is None
    assert (second["slot"], second["blueprint"], second["age"]) == ("r0c0", "mlp_small", 2)
    assert second["gradient_parity"] > 0
    assert second["activation_parity"] >= 0


def test_measuring_changes_no_training():
    """The readings are taken in evaluation; what is learned does not depend on them."""
    env, _ = grow("mlp_small", 4)
    other, _ = grow("mlp_small", 4)
    other.garden.evaluate(0)
    assert math.isnan(other.population.networks[0].slot(0).activation_ratio())
    for one, two in zip(
        env.population.networks[0].parameters(),
        other.population.networks[0].parameters(),
        strict=True,
    ):
        assert torch.equal(one, two)


def features(table, **options):
    return signals_to_features(FeatureExtractionContext(situation(table), **options))[0]


def test_the_block_is_optional_and_comes_last():
    table = one_seed(SeedStage.TRAINING, n_slots=2, n=2, age=2)
    plain, more = features(table), features(table, use_newborn=True)
    assert len(more) == len(plain) + 6 == feature_size(2, 14, use_newborn=True)
    assert len(plain) == feature_size(2, 14)
    assert np.array_equal(more[: len(plain)], plain)
    assert not more[len(plain) :].any()


def test_the_block_shows_parity_of_newborns_only():
    table = one_seed(SeedStage.TRAINING, n_slots=2, n=2, age=2)
    table.gradient_ratio[0, 0], table.activation_ratio[0, 0] = 10.0, 0.01
    assert features(table, use_newborn=True)[-6:].tolist() == pytest.approx([1, 0.5, -1, 0, 0, 0])
    table.activation_ratio[0, 0] = 0.0
    assert features(table, use_newborn=True)[-4] == -2.0
    table.epochs_total[0, 0] = NEWBORN_EPOCHS + 1
    assert not features(table, use_newborn=True)[-6:].any()
