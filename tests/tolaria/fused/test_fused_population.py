"""Isolation, neighbours, coalitions, snapshots and export of the fused population."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from fused_support import adopt, pair, plant, recipe, shake
from torch import Tensor, nn

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.export import largest_difference
from esper.growth.lifecycle import GATED
from esper.leyline import ConfigError, InvalidStateMachineError, SeedStage
from esper.tolaria.engine.batches import TensorSource
from esper.tolaria.engine.recipe import export_network
from esper.tolaria.fused.network import Seed
from esper.tolaria.fused.population import FusedPopulation
from helpers import everywhere, fitting

ALL = np.ones(3, dtype=bool)


class Poison(nn.Module):
    """Gives NaN, always."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum() * torch.nan


def poisonous() -> FusedPopulation:
    catalogue = default_catalogue().with_blueprint(everywhere("poison", Poison))
    return FusedPopulation(recipe(catalogue=catalogue), [1, 2, 3])


def seed_of(population: FusedPopulation, env: int, slot: int) -> Seed:
    seed = population.seeds[env][slot]
    assert seed is not None
    return seed


@pytest.mark.parametrize("host", ["cnn", "mlp"])
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_an_isolated_seed_leaves_its_host_alone_bit_for_bit(host: str, slot: int) -> None:
    """Host e has the e-th blueprint; the last one has no seed."""
    made, names = recipe(host), fitting(host)
    keys, running = list(range(len(names) + 1)), np.ones(len(names) + 1, dtype=bool)
    without, with_seeds = FusedPopulation(made, keys), FusedPopulation(made, keys)
    for env, name in enumerate(names):
        plant((with_seeds,), env, slot, name, SeedStage.TRAINING, 0.0)
    born = [seed_of(with_seeds, env, slot).row.values for env in range(len(names))]
    one, other = without.train_epoch(running, 0), with_seeds.train_epoch(running, 0)
    assert np.array_equal(one.loss, other.loss)
    for mine, theirs in zip(without.hosts, with_seeds.hosts, strict=True):
        assert torch.equal(mine.values, theirs.values)
    for env, values in enumerate(born):
        learnt = seed_of(with_seeds, env, slot).row
        assert not torch.equal(values, learnt.values), "the seed learns"
        assert learnt.steps == 3


@pytest.mark.parametrize("blended", [True, False])
def test_nan_of_a_seed_stays_where_it_is(blended: bool) -> None:
    """Isolated it leaves even its host alone; blended it breaks that one and no other."""
    clean, sick = poisonous(), poisonous()
    stage, alpha = (SeedStage.BLENDING, 0.5) if blended else (SeedStage.TRAINING, 0.0)
    for env in (0, 2):
        plant((clean, sick), env, 0, "conv_light", SeedStage.HOLDING, 1.0)
        plant((clean, sick), env, 2, "branch", SeedStage.BLENDING, 0.5, GATED)
    plant((clean, sick), 1, 2, "branch", SeedStage.HOLDING, 1.0)
    plant((sick,), 1, 0, "poison", stage, alpha)
    expected, found = clean.train_epoch(ALL, 0), sick.train_epoch(ALL, 0)
    whole = [0, 2] if blended else [0, 1, 2]
    for env in whole:
        assert torch.equal(clean.hosts[env].values, sick.hosts[env].values)
        for slot in (0, 2):
            before = clean.seeds[env][slot]
            if before is not None:
                assert torch.equal(before.row.values, seed_of(sick, env, slot).row.values)
    assert np.array_equal(expected.loss[whole], found.loss[whole])
    assert found.finite[1] == (not blended)
    assert not found.seeds["healthy"][1, 0]
    assert found.seeds["healthy"][[0, 2]].all()
    assert not seed_of(sick, 1, 0).row.values.isfinite().all()
    evaluation = sick.evaluate(np.arange(3), np.ones((3, 3), dtype=bool))
    assert np.isfinite(evaluation.loss).tolist() == [True, not blended, True]


@pytest.mark.parametrize("host", ["cnn", "mlp"])
@pytest.mark.parametrize("last_batch", [48, 22, 1])
def test_a_host_does_not_depend_on_its_neighbours(host: str, last_batch: int) -> None:
    """Alone and among others it gets the same bits, whatever the size of a batch."""
    made = recipe(host)
    assert isinstance(made.data, TensorSource)
    (x, y), val, train = made.data.train, made.data.val, 64 + last_batch
    val = val[0][:last_batch], val[1][:last_batch]
    made = replace(made, data=TensorSource((x[:train], y[:train]), val, batch=64))
    names = fitting(host)
    envs = len(names) + 1
    together = FusedPopulation(made, range(envs))
    for env in range(envs):
        plant((together,), env, env % 3, names[env % len(names)], SeedStage.BLENDING, 0.5, GATED)
    found = [together.train_epoch(np.ones(envs, dtype=bool), step) for step in range(2)]
    for env in (0, 4, envs - 1):
        alone, slot = FusedPopulation(made, [env]), env % 3
        index = alone.template.catalogue.index(names[env % len(names)])
        alone.germinate(0, slot, index, GATED, key=17 * env + slot)
        alone.set_blend(0, slot, SeedStage.BLENDING, 0.5)
        for step in range(2):
            assert alone.train_epoch(np.array([True]), step).loss[0] == found[step].loss[env]
        (mine,), (theirs,) = alone.snapshot(np.array([0])), together.snapshot(np.array([env]))
        for a, b in zip(mine.all_tensors(), theirs.all_tensors(), strict=True):
            assert torch.equal(a, b)
        present = np.ones((envs, 3), dtype=bool)
        one, all_of_them = (
            alone.evaluate(np.array([0]), present[:1]),
            together.evaluate(np.arange(envs), present),
        )
        assert one.loss[0] == all_of_them.loss[env]
        assert np.array_equal(one.alpha[0], all_of_them.alpha[env])


@pytest.mark.parametrize(
    ("host", "kind"),
    [("cnn", "conv_light"), ("cnn", "widen_half"), ("mlp", "mlp"), ("mlp", "widen_double")],
)
def test_coalitions(host: str, kind: str) -> None:
    """All eight coalitions of three seeds, of hosts with none, some and many, in any order."""
    both = looped, fused = pair(recipe(host), [1, 2, 3, 4])
    last = "norm" if kind != "widen_half" else kind
    for slot, name in enumerate((kind, "branch", last)):
        plant(both, 0, slot, name, SeedStage.BLENDING, 0.6, GATED)
        plant(both, 1, slot, "branch", SeedStage.HOLDING)
    plant(both, 2, 1, kind, SeedStage.TRAINING, 0.0)
    plant(both, 2, 2, kind, SeedStage.FOSSILIZED)
    shake(looped)
    adopt(fused, looped)
    coalitions = np.array(list(product([True, False], repeat=3)))
    envs = np.repeat([1, 3, 0, 2], len(coalitions))
    present = np.tile(coalitions, (4, 1))
    shuffled = np.random.default_rng(0).permutation(len(envs))[:27]
    for chosen in (np.arange(len(envs)), shuffled, np.array([5]), np.array([2, 2, 17, 17])):
        expected = looped.evaluate(envs[chosen], present[chosen])
        found = fused.evaluate(envs[chosen], present[chosen])
        np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)
        np.testing.assert_allclose(found.score, expected.score, atol=1e-5)
        np.testing.assert_allclose(found.alpha, expected.alpha, atol=1e-6)
        assert found.samples == expected.samples
    nothing = fused.evaluate(envs[:0], present[:0])
    assert (nothing.loss.shape, nothing.alpha.shape, nothing.samples) == ((0,), (0, 3), 0)
    assert len(set(looped.evaluate(np.zeros(8, dtype=int), coalitions).loss)) == 8


def test_snapshots_bring_one_host_back_bit_for_bit() -> None:
    made = recipe()
    population, witness = FusedPopulation(made, [1, 2, 3]), FusedPopulation(made, [1, 2, 3])
    for each in (population, witness):
        plant((each,), 1, 0, "conv_light", SeedStage.BLENDING, 0.4, GATED)
        each.train_epoch(ALL, 0)
    (saved,) = population.snapshot(np.array([1]))
    kept = [tensor.clone() for tensor in saved.all_tensors()]
    population.train_epoch(ALL, 1)
    population.set_blend(1, 0, SeedStage.HOLDING, 1.0)
    population.remove(1, 0)
    plant((population,), 1, 2, "norm", SeedStage.HOLDING)
    population.train_epoch(ALL, 2)
    others = population.hosts[0], population.hosts[2]
    assert all(torch.equal(a, b) for a, b in zip(kept, saved.all_tensors(), strict=True))
    population.restore(np.array([1]), [saved])
    assert (population.hosts[0], population.hosts[2]) == others
    assert population.seeds[1][2] is None
    only = np.array([False, True, False])
    for step in (1, 2):
        one, other = population.train_epoch(only, step), witness.train_epoch(only, step)
        assert one.loss[1] == other.loss[1]
    for mine, theirs in zip(
        population.snapshot(np.array([1]))[0].all_tensors(),
        witness.snapshot(np.array([1]))[0].all_tensors(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_a_snapshot_holds_its_own_rows_only() -> None:
    population = FusedPopulation(recipe(), [1, 2, 3])
    plant((population,), 1, 0, "conv_light", SeedStage.BLENDING, 0.4, GATED)
    population.train_epoch(ALL, 0)
    (saved,) = population.snapshot(np.array([1]))
    assert len(saved.all_tensors()) == 3
    for tensor in saved.all_tensors():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("host", ["cnn", "mlp"])
def test_export_equals_the_live_network(host: str) -> None:
    population = FusedPopulation(recipe(host), [1, 2])
    for slot, name in enumerate(("norm", "branch", "widen_half")):
        plant((population,), 1, slot, name, SeedStage.BLENDING, 0.6, GATED)
    population.train_epoch(np.ones(2, dtype=bool), 0)
    exported = export_network(population.recipe, population.network(1))
    (x, y) = population.data.val
    assert largest_difference(exported, population.network(1), x) < 1e-6
    loss = nn.functional.cross_entropy(exported(x), y)
    live = population.evaluate(np.array([1]), np.ones((1, 3), dtype=bool))
    assert float(loss.detach()) == pytest.approx(live.loss[0], abs=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    population = FusedPopulation(recipe(), [1])
    plant((population,), 0, 0, "norm")
    with pytest.raises(InvalidStateMachineError, match="already holds"):
        plant((population,), 0, 0, "norm")
    with pytest.raises(ConfigError, match="does not fit"):
        plant((population,), 0, 1, "lora")
    assert population.seeds[0][1] is None
