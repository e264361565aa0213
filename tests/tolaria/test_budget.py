"""Runs that begin with trained hosts, and runs that end when their budget is spent."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import ConfigError, LifecycleOp
from esper.leyline.growth_settings import GrowthSettings, RateSchedule
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.controllers.simple import RandomController, StaticController
from esper.tamiyo.situation import Situation, wait
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import make_env, play, play_run
from esper.tolaria.engine.saved_state import cycle_state, load_cycle_state
from esper.tolaria.fused.population import FusedPopulation
from helpers import small_digits

BRANCH = default_catalogue().index("branch")


def plain(steps: int, **own: Any) -> GrowthSettings:
    """Without what a trained host has by default: joint seeds, cooling and a schedule."""
    usual = {"incubation": "isolated", "cooling": False, "schedule": RateSchedule()}
    return GrowthSettings(steps, **{**usual, **own})


def trained_recipe(keys: list[int], epochs: int = 2) -> HostRecipe:
    task, data = small_digits()
    recipe = task.recipe(data, default_catalogue())
    population = LoopedPopulation(recipe, keys)
    for step in range(epochs):
        population.train_epoch(np.ones(len(keys), dtype=bool), step)
    hosts = [network.host for network in population.networks]
    weights = {
        key: {name: t.clone() for name, t in host.state_dict().items()}
        for key, host in zip(keys, hosts, strict=True)
    }
    return replace(recipe, weights=weights)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# --- trained hosts -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LoopedPopulation, FusedPopulation])
def test_hosts_arrive_with_their_weights(kind: Any) -> None:
    recipe = trained_recipe([3, 4])
    assert recipe.weights is not None
    population = kind(recipe, [4, 3])
    for env, key in enumerate((4, 3)):
        network = population.networks[env] if kind is LoopedPopulation else population.network(env)
        assert same(dict(recipe.weights[key]), network.host.state_dict())


def test_weights_that_are_missing_or_of_another_host_are_refused() -> None:
    recipe = trained_recipe([3])
    with pytest.raises(ConfigError, match="no weights for the host of key 5, only for 3"):
        LoopedPopulation(recipe, [5])
    assert recipe.weights is not None
    partial = {name: t for name, t in recipe.weights[3].items() if "head" not in name}
    with pytest.raises(ConfigError, match="key 3 do not fit CNNHost: Missing"):
        LoopedPopulation(replace(recipe, weights={3: partial}), [3])


def test_a_trained_host_is_looked_at_and_then_goes_on() -> None:
    recipe = trained_recipe([3])
    env = make_env(recipe, [3], plain(2, start="trained"))
    situation = env.reset()
    by_itself = LoopedPopulation(recipe, [3])
    whole = np.ones((1, 3), dtype=bool)
    found = by_itself.evaluate(np.array([0]), whole)
    assert situation.step == 0
    assert situation.signals.val_loss[0] == found.loss[0]
    assert np.isnan(situation.signals.train_loss[0])
    assert situation.masks.op[0, LifecycleOp.GERMINATE], "a seed can be planted right away"
    assert env.garden.train_macs[0] == env.garden.host_macs * found.samples
    assert env.best_score[0] == found.score[0]
    before = env.garden.train_macs[0]
    transition = env.step(wait(1))
    assert transition.train_macs[0] == env.garden.train_macs[0] - before > 0
    by_itself.train_epoch(np.array([True]), 1)
    ours = env.population.networks[0].host.state_dict()  # type: ignore[attr-defined]
    assert same(ours, by_itself.networks[0].host.state_dict())


def test_training_that_harms_a_trained_host_leaves_it_as_it_came() -> None:
    recipe = trained_recipe([3])
    assert recipe.weights is not None
    harmful = replace(recipe, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    rules = plain(2, start="trained")
    (found,) = play_run(harmful, [3], rules, StaticController(), task="digits")
    assert found.outcome.best_step == 0
    assert same(dict(recipe.weights[3]), found.model.state_dict())


def test_a_high_first_loss_of_a_trained_host_is_no_panic() -> None:
    recipe = trained_recipe([3])
    assert recipe.weights is not None
    sure = {name: t * (50.0 if "head" in name else 1.0) for name, t in recipe.weights[3].items()}
    env = make_env(replace(recipe, weights={3: sure}), [3], plain(2, start="trained"))
    situation = env.reset()
    assert situation.signals.val_loss[0] > 10.0
    assert env.governor.panics[0] == 0
    assert env.best[0] is not None


# --- budgets -------------------------------------------------------------------------------------


class OnlyFirst(StaticController):
    """Grows a branch in environment 0 at its first decision."""

    def act(self, situation: Situation) -> np.ndarray:
        actions = super().act(situation)
        if situation.step == 0:
            actions[0] = [0, BRANCH, 0, LifecycleOp.GERMINATE]
        return actions


def epoch_macs(recipe: HostRecipe, key: int = 3) -> tuple[int, int]:
    """What training the host for an epoch costs, and evaluating it."""
    host_macs = LoopedPopulation(recipe, [key]).template.host_macs
    size = recipe.data.size()
    assert size.train is not None
    assert size.val is not None
    return 3 * host_macs * size.train, host_macs * size.val


@pytest.mark.parametrize("start", ["fresh", "trained"])
def test_a_host_that_does_not_grow_trains_as_long_as_its_budget_lasts(start: Any) -> None:
    recipe = trained_recipe([3])
    training, evaluation = epoch_macs(recipe)
    for budget in range(8 * evaluation + training, 6 * (training + evaluation), training // 2):
        rules = plain(40, start=start, max_train_macs=budget)
        (found,) = play_run(recipe, [3], rules, StaticController(), task="digits")
        # Kept for a rollback that did not come, and for settling.
        spare = (2 + (start == "trained")) * evaluation
        epochs = (budget - spare) // (training + evaluation)
        assert found.outcome.steps == epochs - (start == "fresh")
        assert found.outcome.train_macs <= budget


class IfLegal(ScriptedController):
    """Waits where its script is not legal: a budget may close what it asks for."""

    def act(self, situation: Situation) -> np.ndarray:
        try:
            return super().act(situation)
        except ConfigError:
            return wait(situation.n_envs)


GROWING = (
    IfLegal("1 GERMINATE r0c0 branch linear\n2 GERMINATE r0c1 conv_light linear\n", "two"),
    IfLegal("2 GERMINATE r0c2 conv_heavy linear\n3 CULL r0c2\nauto FOSSILIZE\n", "one"),
    RandomController(),
)


@pytest.mark.parametrize("incubation", ["isolated", "joint"])
@pytest.mark.parametrize("controller", GROWING, ids=lambda each: each.name)
def test_no_growth_exceeds_the_budget(controller: Any, incubation: Any) -> None:
    keys = [3, 4, 5]
    recipe = trained_recipe(keys)
    training, evaluation = epoch_macs(recipe)
    draws = np.random.default_rng(1)
    for epochs in draws.uniform(2.0, 30.0, size=4).tolist():
        budget = int(epochs * (training + evaluation)) + 4 * evaluation
        rules = plain(30, incubation=incubation, start="trained", max_train_macs=budget)
        for found in play_run(recipe, keys, rules, controller, task="digits", attribute=False):
            assert found.outcome.train_macs <= budget


def test_one_environment_ends_and_the_others_go_on() -> None:
    recipe = trained_recipe([3, 4])
    training, evaluation = epoch_macs(recipe)
    rules = plain(
        30,
        incubation="joint",
        start="trained",
        max_train_macs=10 * (training + evaluation),
        max_seeds=1,
    )
    grown, other = play_run(recipe, [3, 4], rules, OnlyFirst(), task="digits", attribute=False)
    assert 0 < grown.outcome.steps < other.outcome.steps < 10


def test_a_schedule_ends_with_the_budget_and_what_is_left_is_told() -> None:
    recipe = trained_recipe([3])
    training, evaluation = epoch_macs(recipe)
    budget = int(7.4 * (training + evaluation))
    rules = plain(30, start="trained", max_train_macs=budget, schedule=RateSchedule(decay=0.5))
    env = make_env(recipe, [3], rules)
    left, progress = [], []

    def look(env: Any) -> bool:
        assert env.situation is not None
        left.append(float(env.situation.left[0]))
        progress.append(float(env.progress[0]))
        assert left[-1] == pytest.approx(1.0 - env.garden.train_macs[0] / budget)
        return True

    play(env, StaticController(), after_epoch=look)
    epochs = len(progress) - 1
    assert epochs >= 5
    np.testing.assert_allclose(progress, np.arange(epochs + 1) / epochs, atol=1e-12)


def test_what_is_left_without_a_budget_is_steps() -> None:
    env = make_env(trained_recipe([3]), [3], GrowthSettings(4))
    assert env.reset().left.tolist() == [1.0]
    assert env.step(wait(1)).after.left.tolist() == [0.75]


def test_budgets_that_cannot_work_are_refused() -> None:
    recipe = trained_recipe([3])
    training, evaluation = epoch_macs(recipe)
    least = training + 3 * evaluation
    with pytest.raises(ConfigError, match=f"max_train_macs={least - 1} .* need {least}; give"):
        make_env(recipe, [3], GrowthSettings(4, max_train_macs=least - 1)).reset()
    make_env(recipe, [3], GrowthSettings(4, max_train_macs=least)).reset()
    with pytest.raises(ConfigError, match="needs keep_best"):
        GrowthSettings(4, max_train_macs=least, keep_best=False)
    with pytest.raises(ConfigError, match="start must be 'fresh' or 'trained', got 'warm'"):
        GrowthSettings(4, start="warm")  # type: ignore[arg-type]


def test_a_run_that_is_taken_up_has_the_same_schedule_and_budget() -> None:
    recipe = trained_recipe([3])
    training, evaluation = epoch_macs(recipe)
    rules = plain(
        30,
        incubation="joint",
        start="trained",
        max_train_macs=30 * (training + evaluation),
        schedule=RateSchedule(0.2, 0.5),
    )

    def go_on(env: Any) -> None:
        controller = OnlyFirst()
        while env.running.any():
            env.step(controller.act(env.situation))

    whole, taken_up = make_env(recipe, [3], rules), make_env(recipe, [3], rules)
    whole.reset()
    for _ in range(3):
        assert whole.situation is not None
        whole.step(OnlyFirst().act(whole.situation))
    load_cycle_state(taken_up, cycle_state(whole))
    go_on(whole)
    go_on(taken_up)
    assert whole.step_count == taken_up.step_count > 4
    assert whole.garden.train_macs.tolist() == taken_up.garden.train_macs.tolist()
    states = [env.population.networks[0].state_dict() for env in (whole, taken_up)]  # type: ignore[attr-defined]
    assert same(*states)
