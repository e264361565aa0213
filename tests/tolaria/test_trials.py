"""Trials of candidates: all at once is one by one, and nothing is left behind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trial_support import (
    EVERYTHING,
    InPlace,
    MixesExamples,
    Skips,
    by_hand,
    everything,
    recipe,
)

from esper.growth import CNNHost, LifecycleRules, default_catalogue, take_snapshot
from esper.leyline import ConfigError, SeedStage
from esper.tamiyo import TrialPlan
from esper.tolaria import FusedPopulation, GrowthEnv, LoopedPopulation, find_task
from esper.tolaria.trials import PART, summed_up
from helpers import plant

CATALOGUE = default_catalogue()
PLAN = TrialPlan(EVERYTHING, steps=5, batch=24, val_samples=130)


def trained(name: str, keys: list[int], kind: Any = LoopedPopulation, **changes: Any) -> Any:
    population = kind(recipe(name, **changes), keys)
    population.train_epoch(np.ones(len(keys), dtype=bool), 0)
    return population


@pytest.mark.parametrize("host", ["cnn", "mlp", "transformer"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_all_at_once_is_one_by_one(host, clip):
    population = trained(host, [3], max_grad_norm=clip)
    tried = everything(population)
    found = population.try_candidates(tried, PLAN, step=2)
    # A block of a transformer adds what it had before the layer that a bypass adds to.
    alone = [host == "transformer" and spec.kind == "bypass" for spec in CATALOGUE.specs]
    np.testing.assert_array_equal(found.shared, np.tile(np.invert(alone), (3, 1)))
    expected = np.full(tried.shape, np.nan)
    for env, slot, blueprint in np.argwhere(tried).tolist():
        expected[env, slot, blueprint] = by_hand(population, env, slot, blueprint, PLAN, 2)
    np.testing.assert_allclose(found.gain, expected, atol=1e-4)
    # Gains that are all alike would show nothing.
    assert np.nanstd(found.gain) > 1e-2


@pytest.mark.parametrize(
    "seeds",
    [
        *[("branch", "conv_light"), ("conv_light", "branch")],
        *[("widen_double", "branch"), ("branch", "widen_half")],
    ],
)
@pytest.mark.parametrize("kind", [LoopedPopulation, FusedPopulation])
def test_seeds_that_are_there_take_part(seeds, kind):
    looped = trained("cnn", [3, 4])
    population = kind(looped.recipe, [3, 4])
    population.train_epoch(np.ones(2, dtype=bool), 0)
    for slot, blueprint in zip((0, 2), seeds, strict=True):
        plant(looped.networks[1], slot, blueprint, SeedStage.BLENDING, 0.5, shake=0.0)
        population.germinate(1, slot, looped.template.catalogue.index(blueprint), 0, slot + 1)
        population.set_blend(1, slot, SeedStage.BLENDING, 0.5)
    tried = everything(looped)
    tried[1, [0, 2]] = False
    found = population.try_candidates(tried, PLAN, step=1)
    for env, slot, blueprint in np.argwhere(tried).tolist():
        expected = by_hand(looped, env, slot, blueprint, PLAN, 1)
        assert found.gain[env, slot, blueprint] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("host", ["cnn", "mlp"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_fused_trials_are_looped_trials(host, clip):
    keys = [1, 2, 3]
    looped, fused = (
        trained(host, keys, kind, max_grad_norm=clip)
        for kind in (LoopedPopulation, FusedPopulation)
    )
    tried = everything(looped)
    tried[1, 0] = tried[2] = False
    one, other = (each.try_candidates(tried, PLAN, 4) for each in (looped, fused))
    np.testing.assert_allclose(one.gain, other.gain, atol=1e-4)
    np.testing.assert_allclose(one.error, other.error, atol=1e-4)
    np.testing.assert_array_equal(np.isnan(other.gain), ~tried)
    for name in ("train_samples", "val_samples", "shared", "behind"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("host", "shared", "bypasses"),
    [
        (Skips, [True, False], [False, False]),
        (MixesExamples, [False, False], [False, True]),
        (InPlace, [True, True], [True, True]),
    ],
)
def test_models_that_take_no_copies_are_noticed(host, shared, bypasses):
    population = trained("cnn", [5], build=host, slots=("first", "second"))
    tried = everything(population)
    found = population.try_candidates(tried, PLAN, 0)
    bypass = np.array([spec.kind == "bypass" for spec in CATALOGUE.specs])
    assert found.shared[:, ~bypass].all(axis=1).tolist() == shared
    assert found.shared[:, bypass].all(axis=1).tolist() == bypasses
    for env, slot, blueprint in np.argwhere(tried).tolist():
        expected = by_hand(population, env, slot, blueprint, PLAN, 0)
        assert found.gain[env, slot, blueprint] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("host", "changes"),
    [
        ("cnn", {}),
        ("transformer", {}),
        ("cnn", {"build": Skips, "slots": ("first", "second")}),
        ("cnn", {"build": InPlace, "slots": ("first", "second")}),
    ],
)
def test_nothing_is_left_behind(host, changes):
    population = trained(host, [3], **changes)
    network, optimizer = population.networks[0], population.optimizers[0]

    def everything_known() -> list[torch.Tensor]:
        snapshot = take_snapshot(network, optimizer)
        found = [*snapshot.all_tensors(), *network.state_dict().values(), torch.get_rng_state()]
        return [tensor.clone() for tensor in found]

    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules()]

    tried = everything(population)
    before, mode, hooked = everything_known(), network.training, hooks()
    grads = [None if p.grad is None else p.grad.clone() for p in network.parameters()]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    first = population.try_candidates(tried, PLAN, 1)
    for a, b in zip(before, everything_known(), strict=True):
        assert torch.equal(a, b)
    for grad, param in zip(grads, network.parameters(), strict=True):
        assert (grad is None and param.grad is None) or torch.equal(grad, param.grad)
    assert (mode, hooked) == (network.training, hooks())
    assert groups == [len(group["params"]) for group in optimizer.param_groups]
    # The same again; and another step is another draw.
    np.testing.assert_array_equal(first.gain, population.try_candidates(tried, PLAN, 1).gain)
    assert not np.array_equal(
        first.gain, population.try_candidates(tried, PLAN, 2).gain, equal_nan=True
    )


def test_a_host_has_its_trials_whoever_is_beside_it():
    for kind in (LoopedPopulation, FusedPopulation):
        alone, among = trained("cnn", [7], kind), trained("cnn", [6, 7, 8], kind)
        one = alone.try_candidates(everything(alone), PLAN, 3)
        other = among.try_candidates(everything(among), PLAN, 3)
        np.testing.assert_array_equal(one.gain[0], other.gain[1])


def test_error_is_that_of_a_mean_of_parts():
    losses = np.array([[1.0, 0.5, 1.0], [2.0, 1.0, 2.5], [3.0, 2.0, np.nan]])
    gain, error = summed_up(losses, [10, 10, 10])
    falls = np.array([0.5, 1.0, 1.0])
    assert gain[0] == pytest.approx(falls.mean())
    assert error[0] == pytest.approx(falls.std(ddof=1) / np.sqrt(3))
    assert gain[1] == -np.inf
    assert np.isnan(summed_up(losses[:1], [10])[1]).all()


@pytest.mark.parametrize("kind", [LoopedPopulation, FusedPopulation])
def test_the_bill_counts_what_is_run(kind):
    """A multiply-add counter on the loop finds what is charged, but for what the host's own rows
    cost in the backward pass that copies share with them."""
    population = kind(recipe("cnn"), [1, 2])
    env = GrowthEnv(population, LifecycleRules(10))
    env.reset()
    plan = TrialPlan(("conv_light", "branch"), steps=3, batch=16, val_samples=100)
    spent = env.garden.train_macs.copy()
    env.try_candidates(plan, np.array([True, False]))
    spent = env.garden.train_macs - spent
    garden, macs = env.garden, env.garden.limits.macs
    conv, branch = (garden.narrator.catalogue.index(name) for name in plan.blueprints)
    # Blocks of the digits host: 3x3 convolutions from 1 to 2, 2 to 4, 4 to 8 channels.
    behind = [2 * 4 * 9 * 16 + 4 * 8 * 9 * 4 + 80, 4 * 8 * 9 * 4 + 80, 80]
    host = 1 * 2 * 9 * 64 + behind[0]
    assert host == garden.host_macs
    seeds = macs[:, [conv, branch]].sum()
    training = 3 * 16 * (host + 2 * sum(behind) + 3 * seeds)
    validation = 128 * (host + sum(behind) + seeds)
    assert spent.tolist() == [training + validation, 0]
    # The next step tells of it, and only that one.
    step = env.step(_waiting(env))
    assert step.train_macs[0] - step.train_macs[1] == spent[0]
    after = env.step(_waiting(env))
    assert after.train_macs[0] == after.train_macs[1]


def _waiting(env: GrowthEnv) -> np.ndarray:
    from esper.tamiyo import wait

    return wait(env.n_envs)


def test_trials_are_as_long_as_the_budget_pays_for():
    """As planned, shortened or not at all, by what is left after another epoch."""
    plan = TrialPlan(("conv_light", "branch"))
    costs, samples = [], []
    for more in (None, None, 0, -1):
        env = GrowthEnv(LoopedPopulation(recipe("cnn"), [1]), LifecycleRules(10))
        situation = env.reset()
        tried = plan.candidates(situation.masks, situation.catalogue)
        if not costs:
            # A trial looks at whole batches of validation, so that more is kept back for it.
            costs = [
                int(env.trial_macs(tried, replace(p, val_samples=p.val_samples + PART))[0])
                for p in (plan, plan.shortened())
            ]
            assert costs[1] < costs[0] / 5
        purse, look = env.purse, env.purse.evaluation()
        needed = env.garden.train_macs + purse.training() + look + purse.reserve(look, env.best)
        price = costs[len(samples)] if more is None else costs[1] + more
        purse.max_macs = int(needed[0]) + price
        spent = env.garden.train_macs.copy()
        found = env.try_candidates(plan, np.array([True])).trials
        samples.append(int((env.garden.train_macs - spent)[0]))
        assert (found is None) == (more == -1)
    assert samples[0] > 5 * samples[1] > 0
    assert samples[1:] == [samples[1], samples[1], 0]


@pytest.mark.parametrize("kind", [LoopedPopulation, FusedPopulation])
def test_a_poor_host_does_not_shorten_the_trials_of_its_neighbour(kind):
    plan, everyone = TrialPlan(("conv_light", "branch")), np.array([True, True])

    def tried(debts):
        env = GrowthEnv(kind(recipe("cnn"), [1, 2]), LifecycleRules(10))
        env.reset()
        env.purse.max_macs = 2 * int(env.garden.train_macs.max()) + 10**9
        env.garden.train_macs += debts
        before = env.garden.train_macs.copy()
        return env.try_candidates(plan, everyone).trials.gain, env.garden.train_macs - before

    def debt():
        """What leaves enough for short trials, and not for those that are planned."""
        env = GrowthEnv(kind(recipe("cnn"), [1, 2]), LifecycleRules(10))
        situation, purse = env.reset(), env.purse
        candidates = plan.candidates(situation.masks, situation.catalogue)
        look = purse.evaluation()
        kept = purse.training() + look + purse.reserve(look, env.best)
        short = replace(plan.shortened(), val_samples=plan.shortened().val_samples + PART)
        left = kept[1] + env.trial_macs(candidates, short)[1]
        return 10**9 + 2 * int(env.garden.train_macs.max()) - int(env.garden.train_macs[1]) - left

    rich, rich_cost = tried(np.array([0, 0]))
    mixed, mixed_cost = tried(np.array([0, debt()]))
    np.testing.assert_array_equal(mixed[0], rich[0])
    assert mixed_cost[0] == rich_cost[0]
    assert 0 < 5 * mixed_cost[1] < rich_cost[1]
    assert np.isfinite(mixed[1][np.isfinite(rich[1])]).all()


def test_only_what_could_be_planted_is_tried():
    env = GrowthEnv(LoopedPopulation(recipe("cnn"), [1]), LifecycleRules(10), max_seeds=2)
    env.reset([(1, env.garden.narrator.catalogue.index("norm"))])
    plan = TrialPlan(("conv_light", "lora", "no such thing"), steps=1)
    scores = env.try_candidates(plan, np.array([True])).trials
    assert scores is not None
    light = env.garden.narrator.catalogue.index("conv_light")
    tried = np.argwhere(~np.isnan(scores.gain[0])).tolist()
    assert tried == [[0, light], [2, light]]


def test_the_way_around_a_narrow_block_ranks_first():
    """Blocks of 8, 1 and 8 channels: only a branch from the first one goes past the second."""
    task = find_task("digits")
    task = replace(task, build=lambda: CNNHost(widths=(8, 1, 8), in_channels=1))
    population = FusedPopulation(task.recipe(task.load(Path("unused"))), range(4))
    for step in range(15):
        population.train_epoch(np.ones(4, dtype=bool), step)
    names = population.template.catalogue.names
    tried = everything(population) & np.isin(names, ("branch", "conv_light"))
    gain = population.try_candidates(tried, TrialPlan(("branch", "conv_light")), 15).gain
    best = np.nan_to_num(gain, nan=-np.inf).reshape(4, -1).argmax(axis=1)
    slot, blueprint = np.unravel_index(best, gain.shape[1:])
    assert sum((slot == 0) & (blueprint == names.index("branch"))) >= 3


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch": 0}, {"val_samples": 0}])
def test_bad_plans_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrialPlan(("branch",), **wrong)
    with pytest.raises(ConfigError, match="at least one"):
        TrialPlan(())
