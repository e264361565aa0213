"""Cooling of hosts that have nothing left to learn."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import History, LifecycleOp
from esper.leyline.constants import COOLING_SAMPLES, COOLING_STARVED, COOLING_TARGET
from esper.leyline.events import CoolingRefused, GovernorPanic, HostCooled
from esper.leyline.growth_settings import GrowthSettings, RateSchedule
from esper.proof.compute import of_width
from esper.tamiyo.controllers.simple import StaticController
from esper.tamiyo.situation import wait
from esper.tolaria.engine.cooling import Cooler
from esper.tolaria.engine.gradients import answers, batch_rho, find_tau, starvation
from esper.tolaria.engine.objectives import cross_entropy, mse
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthEnv, make_env, play, play_run
from esper.tolaria.engine.saved_state import cycle_state, load_cycle_state
from helpers import small_digits

BRANCH = default_catalogue().index("branch")
KEYS = [3, 4]


# --- rho and tau ---------------------------------------------------------------------------------


def slow_rho(logits: np.ndarray, classes: np.ndarray, tau: float = 1.0) -> float:
    total = 0.0
    for row, answer in zip(logits.tolist(), classes.tolist(), strict=True):
        weights = [np.exp(tau * (z - max(row))) for z in row]
        gaps = [w / sum(weights) - (k == answer) for k, w in enumerate(weights)]
        total += sum(gap**2 for gap in gaps) ** 0.5
    return total / len(logits)


def sure(draws: np.random.Generator, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Large logits, nearly all of them right."""
    answer = draws.integers(classes, size=40)
    logits = draws.normal(size=(40, classes)) * 2.0
    logits[np.arange(40), answer] += draws.uniform(6.0, 25.0)
    return logits, answer


def test_rho_and_tau_are_those_of_a_slow_reference() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    draws = np.random.default_rng(0)
    for classes in (2, 5, 12):
        for _ in range(5):
            logits, answer = sure(draws, classes)
            rho, tau = find_tau(torch.tensor(logits), torch.tensor(answer))
            assert rho == pytest.approx(slow_rho(logits, answer), rel=1e-9)
            assert rho < COOLING_STARVED, "or the case shows nothing"
            root = optimize.brentq(
                lambda t, z=logits, y=answer: slow_rho(z, y, t) - COOLING_TARGET, 1e-9, 1.0
            )
            assert tau == pytest.approx(root, rel=1e-6)
            assert 0.0 < tau < 1.0


def test_who_is_not_starved_is_not_cooled() -> None:
    logits, answer = np.random.default_rng(1).normal(size=(40, 5)), np.arange(40) % 5
    rho, tau = find_tau(torch.tensor(logits), torch.tensor(answer))
    assert rho == pytest.approx(slow_rho(logits, answer), rel=1e-9)
    assert rho > COOLING_STARVED
    assert tau == 1.0


def test_only_answers_that_count_are_looked_at_and_only_classes() -> None:
    logits, target = torch.randn(2, 3, 4), torch.tensor([[0, 1, -100], [3, -100, 2]])
    found = answers(cross_entropy, {"logits": logits}, target)
    assert found is not None
    assert found[0].shape == (4, 4)
    assert found[1].tolist() == [0, 1, 3, 2]
    assert answers(cross_entropy, logits[0], torch.randn(3)) is None
    assert answers(cross_entropy, torch.randn(3, 1), torch.zeros(3, dtype=torch.long)) is None
    assert batch_rho(mse, logits[0], torch.tensor([0, 1, 2])).isnan()
    assert starvation(torch.zeros(7, 4), torch.zeros(7, dtype=torch.long)) == pytest.approx(
        0.75**0.5
    )


# --- hosts ---------------------------------------------------------------------------------------


@cache
def starved() -> HostRecipe:
    """Hosts that have memorised 64 digits, and are very sure of it."""
    task, data = small_digits(64)
    recipe = of_width(task, 6).recipe(data, default_catalogue())
    population = LoopedPopulation(recipe, KEYS)
    for step in range(40):
        population.train_epoch(np.ones(2, dtype=bool), step)
    weights = {}
    for key, network in zip(KEYS, population.networks, strict=True):
        state = network.host.state_dict()
        weights[key] = {n: t.clone() * (8.0 if "head" in n else 1.0) for n, t in state.items()}
    return replace(recipe, weights=weights)


def hungry() -> HostRecipe:
    """The same hosts before they were trained."""
    return replace(starved(), weights=None)


def cooled_env(recipe: HostRecipe, history: History | None = None, **rules: Any) -> GrowthEnv:
    settings = {
        "steps": 3,
        "start": "trained",
        "cooling": True,
        "incubation": "isolated",
        "schedule": RateSchedule(),
        **rules,
    }
    return make_env(recipe, KEYS, GrowthSettings(**settings), history)


def state(env: GrowthEnv, index: int) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in env.population.network(index).state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_no_more_examples_are_measured_than_the_cost_covers() -> None:
    task, data = small_digits(600)
    recipe = task.adjusted(None, 100).recipe(data)
    cooler = Cooler(LoopedPopulation(recipe, KEYS), recipe, torch.device("cpu"))
    found = cooler.cool(0, step=0)
    assert found.samples == COOLING_SAMPLES < 600
    assert cooler.cost(np.array([7])) == 7 * found.samples


def outputs(env: GrowthEnv, index: int, recipe: HostRecipe) -> tuple[Tensor, Tensor]:
    """Logits and classes of all training data."""
    network = env.population.network(index).eval()
    with torch.no_grad():
        return network(recipe.data.train[0]), recipe.data.train[1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["looped", "fused"])
def test_starved_hosts_are_cooled_to_the_target_and_say_the_same(kind: str) -> None:
    recipe, history = starved(), History()
    env, plain = cooled_env(recipe, history, population=kind), cooled_env(recipe, cooling=False)
    after, before = env.reset(), plain.reset()
    assert [type(e) for e in history.events if "Cool" in type(e).__name__] == [HostCooled] * 2
    cooled = [e for e in history.events if isinstance(e, HostCooled)]
    for index, event in enumerate(cooled):
        logits, classes = outputs(env, index, recipe)
        old, _ = outputs(plain, index, recipe)
        assert event.rho < COOLING_STARVED
        assert float(starvation(logits, classes)) == pytest.approx(COOLING_TARGET, abs=1e-4)
        torch.testing.assert_close(logits, event.tau * old, rtol=1e-5, atol=1e-5)
        assert torch.equal(logits.argmax(1), old.argmax(1))
    assert np.array_equal(after.signals.val_score, before.signals.val_score)
    looked = 64 * env.garden.host_macs
    assert (env.garden.train_macs - plain.garden.train_macs).tolist() == [looked, looked]
    assert after.left.tolist() == before.left.tolist()


def test_fused_hosts_are_cooled_like_looped_ones() -> None:
    envs = [cooled_env(starved(), population=kind) for kind in ("looped", "fused")]
    for env in envs:
        env.reset()
    for tolerance in (1e-6, 1e-4):
        for index in range(2):
            one, other = (state(env, index) for env in envs)
            for name, tensor in one.items():
                torch.testing.assert_close(tensor, other[name], rtol=tolerance, atol=tolerance)
        for env in envs:
            env.step(wait(2))


@pytest.mark.parametrize("kind", ["looped", "fused"])
def test_hosts_that_are_not_starved_are_untouched(kind: str) -> None:
    history = History()
    env = cooled_env(hungry(), history, population=kind)
    plain = cooled_env(hungry(), population=kind, cooling=False)
    for each in (env, plain):
        each.reset()
        each.step(wait(2))
    assert not [e for e in history.events if isinstance(e, HostCooled | CoolingRefused)]
    assert all(same(state(env, index), state(plain, index)) for index in range(2))
    assert (env.rho > COOLING_STARVED).all()


def test_the_best_is_the_host_as_it_came_and_a_rollback_brings_it_back() -> None:
    recipe = starved()
    assert recipe.weights is not None
    env = cooled_env(recipe)
    env.reset()
    assert not torch.equal(state(env, 0)["host.head.weight"], recipe.weights[3]["head.weight"])
    env.garden.restore(np.array([0]), [env.governor.last_healthy(0)])
    came = {f"host.{name}": tensor for name, tensor in recipe.weights[3].items()}
    assert same(state(env, 0), came)
    env.settle(np.ones(2, dtype=bool))
    assert torch.equal(state(env, 1)["host.head.weight"], recipe.weights[4]["head.weight"])


def test_the_optimizer_begins_anew_and_a_rollback_has_the_old_one() -> None:
    population = LoopedPopulation(starved(), KEYS)
    population.train_epoch(np.ones(2, dtype=bool), 0)
    (saved,) = population.snapshot(np.array([0]))
    assert population.cool(0, 0.5) is None
    assert not population.optimizers[0].state
    assert population.optimizers[1].state, "each host has its own"
    population.restore(np.array([0]), [saved])
    (again,) = population.snapshot(np.array([0]))
    tensors = zip(saved.all_tensors(), again.all_tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in tensors)


def grow_branch(env: GrowthEnv, index: int) -> np.ndarray:
    actions = wait(env.n_envs)
    actions[index] = [0, BRANCH, 0, LifecycleOp.GERMINATE]
    return actions


@pytest.mark.parametrize("kind", ["looped", "fused"])
def test_an_isolated_seed_leaves_the_training_of_a_cooled_host_alone(kind: str) -> None:
    envs = [cooled_env(starved(), population=kind, steps=6) for _ in range(2)]
    for env in envs:
        env.reset()
    for step in range(3):
        envs[0].step(grow_branch(envs[0], 0) if step == 0 else wait(2))
        envs[1].step(wait(2))
    assert envs[0].table.holds_seed[0, 0]
    hosts = [{n: t for n, t in state(env, 0).items() if n.startswith("host.")} for env in envs]
    assert same(*hosts)


def test_a_run_cools_where_a_seed_comes_and_only_there() -> None:
    recipe, history = starved(), History()
    env = cooled_env(recipe, history, start="fresh", steps=4)
    env.reset()
    assert not [e for e in history.events if isinstance(e, HostCooled)]
    env.rho[:] = np.nan  # nobody has looked
    before = [state(env, index) for index in range(2)]
    env.begin(grow_branch(env, 1))
    (event,) = [e for e in history.events if isinstance(e, HostCooled)]
    assert (event.env, event.step) == (1, 1)
    assert same(before[0], state(env, 0))
    logits, classes = outputs(env, 1, recipe)
    assert float(starvation(logits, classes)) == pytest.approx(COOLING_TARGET, abs=1e-3)
    transition = env.finish(env.population.train_epoch(env.running, 1))
    assert transition.train_macs[1] - transition.train_macs[0] >= 64 * env.garden.host_macs


def test_what_training_measured_spares_the_look() -> None:
    env = cooled_env(hungry(), start="fresh")
    env.reset()
    readings = LoopedPopulation(hungry(), KEYS).train_epoch(np.ones(2, dtype=bool), 0)
    assert env.rho.tolist() == readings.rho.tolist()
    assert (env.rho > COOLING_STARVED).all()
    spent = env.garden.train_macs.copy()
    env.begin(grow_branch(env, 0))
    assert env.garden.train_macs.tolist() == spent.tolist()


def test_fused_hosts_measure_the_rho_of_looped_ones() -> None:
    both = [cooled_env(starved(), population=kind, cooling=False) for kind in ("looped", "fused")]
    found = [e.population.train_epoch(np.array([True, False]), 0).rho for e in both]
    np.testing.assert_allclose(*found, rtol=1e-4)
    assert found[0][0] < COOLING_STARVED
    assert np.isnan(found[0][1])


def test_what_cannot_be_cooled_is_told_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    env = cooled_env(starved(), history)
    monkeypatch.setattr(env.population, "cool", lambda index, tau: "weights are tied")
    env.reset()
    refused = [e for e in history.events if isinstance(e, CoolingRefused)]
    assert [(e.env, e.reason) for e in refused] == [
        (0, "weights are tied"),
        (1, "weights are tied"),
    ]
    assert env.cooler is not None
    done = env.cooler.cool(0, step=0)
    assert done.rho < COOLING_STARVED
    assert (done.tau, done.refused) == (1.0, "weights are tied"), "nothing was scaled"
    # What is observed is the host as it is.
    assert env.rho == pytest.approx([env.cooler.cool(n, step=0).rho for n in range(2)])
    env.step(wait(2))


def test_a_budget_that_does_not_pay_for_the_look_has_none() -> None:
    recipe = starved()
    plain = make_env(
        recipe,
        KEYS,
        GrowthSettings(
            9, start="trained", incubation="isolated", cooling=False, schedule=RateSchedule()
        ),
    )
    plain.reset()
    macs, size = plain.garden.host_macs, recipe.data.size()
    assert size.train is not None
    assert size.val is not None
    least = macs * (3 * size.train + 5 * size.val)
    for more, kind in ((0, CoolingRefused), (COOLING_SAMPLES * macs, HostCooled)):
        history = History()
        rules = GrowthSettings(
            9,
            start="trained",
            incubation="isolated",
            schedule=RateSchedule(),
            max_train_macs=least + more,
        )
        for found in play_run(recipe, KEYS, rules, StaticController(), task="x", recorder=history):
            assert found.outcome.train_macs <= least + more
        told = [type(e) for e in history.events if isinstance(e, HostCooled | CoolingRefused)]
        assert told == [kind] * 2


@pytest.mark.parametrize("incubation", ["isolated", "joint"])
def test_cooling_is_no_reason_for_the_governor_to_panic(incubation: str) -> None:
    history = History()
    env = cooled_env(starved(), history, steps=8, incubation=incubation, population="fused")
    env.reset()
    before = env.governor.history.copy()
    assert np.isnan(before).all(), "losses of another scale are forgotten"
    for step in range(8):
        env.step(grow_branch(env, 0) if step == 2 else wait(2))
    assert not [e for e in history.events if isinstance(e, GovernorPanic)]
    assert (np.sum(~np.isnan(env.governor.history), axis=1) == 8).all()


def test_a_cooled_run_that_is_taken_up_goes_on_the_same() -> None:
    envs = [cooled_env(starved(), steps=4) for _ in range(2)]
    envs[0].reset()
    envs[0].step(wait(2))
    load_cycle_state(envs[1], cycle_state(envs[0]))
    for env in envs:
        env.step(grow_branch(env, 0))
        play(env, StaticController())
    assert all(same(state(envs[0], index), state(envs[1], index)) for index in range(2))
    assert envs[0].garden.train_macs.tolist() == envs[1].garden.train_macs.tolist()
