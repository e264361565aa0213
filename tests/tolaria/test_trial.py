"""The one way to train and grow networks: make, play, settle."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.grown_module import GrownModule
from esper.growth.hosts import CNNHost
from esper.growth.slot_table import metrics_columns
from esper.leyline import ConfigError, History, LifecycleOp
from esper.leyline.events import SeedCulled, ShapleyComputed
from esper.leyline.growth_settings import Budget, GrowthSettings
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.controllers.simple import StaticController
from esper.tamiyo.situation import Situation
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthEnv, Trained, make_env, play, play_run, settle
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.fused.population import FusedPopulation
from helpers import break_host, small_digits

EARLY = "1 GERMINATE r0c0 branch linear\nauto FOSSILIZE\n"
STEPS = 16


def trained(keys: list[int], rules: GrowthSettings, script: str = EARLY) -> list[Trained]:
    task, data = small_digits()
    controller = ScriptedController(script, "x")
    return play_run(task.recipe(data), keys, rules, controller, task="digits", attribute=True)


def env_of(keys: list[int], recorder: History, **rules: object) -> GrowthEnv:
    task, data = small_digits(64)
    settings: dict[str, object] = {"steps": 4, "on_panic": "terminate", **rules}
    return make_env(task.recipe(data), keys, GrowthSettings(**settings), recorder)  # type: ignore[arg-type]


def test_trials_that_are_trained_together_are_those_that_are_trained_apart() -> None:
    rules = GrowthSettings(STEPS)
    together = trained([3, 4], rules)
    for index, key in enumerate((3, 4)):
        (apart,) = trained([key], rules)
        assert apart.topology == together[index].topology
        assert vars(apart.outcome) | {"env": index} == vars(together[index].outcome)
        for ours, theirs in zip(
            apart.model.parameters(), together[index].model.parameters(), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_a_topology_is_there_from_birth_and_what_is_found_can_be_one() -> None:
    (grown,) = trained([1], GrowthSettings(STEPS))
    assert grown.topology == ((0, default_catalogue().index("branch")),)
    (scratch,) = trained([1], GrowthSettings(2, topology=grown.topology), script="")
    assert scratch.topology == grown.topology
    assert scratch.outcome.params == grown.outcome.params
    assert scratch.outcome.germinated == 0


def test_kept_seeds_are_called_by_their_module_and_their_shares_add_up() -> None:
    task, data = small_digits()
    script = "1 GERMINATE r0c0 branch linear\n2 GERMINATE r0c1 conv_light linear\nauto FOSSILIZE\n"
    history, rules = History(), GrowthSettings(STEPS)
    recipe = task.recipe(data)
    controller = ScriptedController(script, "x")
    (found,) = play_run(recipe, [5], rules, controller, history, task="digits", attribute=True)
    seeds = found.outcome.seeds
    assert [seed.module for seed in seeds] == ["blocks.0", "blocks.1"][: len(seeds)]
    (event,) = [e for e in history.events if isinstance(e, ShapleyComputed)]
    assert [seed.shapley for seed in seeds] == list(event.shapley)
    assert all(seed.shapley_error is None for seed in seeds), "exact with so few"
    assert found.outcome.attribution_macs == event.macs
    if len(seeds) == 1:
        without_it = found.outcome.host_macs * len(data.val_x)
        assert event.macs == without_it, "the complete network was evaluated before"
    bare = make_env(recipe, [5], rules)
    for seed, share in zip(seeds, event.leave_one_out, strict=True):
        assert seed.counterfactual_contribution == pytest.approx(share)
    assert bare.garden.host_params + sum(s.params for s in seeds) == found.outcome.params


def test_who_was_ended_by_the_governor_is_said_to_be() -> None:
    history = History()
    env = env_of([1, 2], history)
    env.reset()
    break_host(env, 0)
    wait = np.zeros((2, 4), dtype=np.int64)
    while env.running.any():
        env.step(wait)
    outcomes = settle(env, np.array([True, True]), task="digits", controller="nobody")
    assert [outcome.ended for outcome in outcomes] == ["rollback", "finished"]
    assert history.outcomes == outcomes


def test_only_those_asked_for_are_settled() -> None:
    history = History()
    env = env_of([1, 2, 3], history)
    play(env, StaticController())
    (outcome,) = settle(env, np.array([False, True, False]), task="digits", controller="static")
    assert (outcome.env, outcome.key) == (1, 2)


def test_seeds_that_are_dropped_at_the_end_are_told() -> None:
    history = History()
    env = env_of([1], history, steps=4)
    play(env, ScriptedController("3 GERMINATE r0c2 norm linear\n", "x"))
    (outcome,) = settle(env, np.array([True]), task="digits", controller="x")
    told = [e for e in history.events if isinstance(e, SeedCulled)]
    assert outcome.culled == len(told) == 1
    assert (told[0].reason, told[0].module) == ("unproven", "blocks.2")


class Interrupting(StaticController):
    def act(self, situation: Situation) -> np.ndarray:
        if situation.step == 2:
            raise KeyboardInterrupt
        return super().act(situation)


def test_ctrl_c_leaves_a_trained_network_that_says_so() -> None:
    task, data = small_digits(64)
    (found,) = play_run(task.recipe(data), [0], GrowthSettings(6), Interrupting(), task="digits")
    assert (found.outcome.ended, found.outcome.steps) == ("interrupted", 2)
    assert isinstance(found.model, nn.Module)


def test_every_measurement_that_is_told_is_in_the_row_of_a_step() -> None:
    history = History()
    env = env_of([1], history)
    env.reset()
    env.step(np.array([[0, default_catalogue().index("branch"), 0, LifecycleOp.GERMINATE]]))
    row = history.rows[-1]
    assert row["slot"] == "blocks.0"
    for module in ("blocks.0", "blocks.1", "blocks.2"):
        assert {f"{module}.{name}" for name in ("stage", "blueprint", *metrics_columns())} <= set(
            row
        )


def test_the_loss_of_a_guess_is_that_of_the_network_s_outputs() -> None:
    assert env_of([1], History()).governor.random_guess_loss == pytest.approx(math.log(10))


@pytest.mark.parametrize(
    ("rules", "culprit"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 3, "incubation": "sudden"}, "sudden"),
        ({"steps": 3, "population": "both"}, "population must be .* got 'both'"),
    ],
)
def test_rules_that_cannot_work_are_refused(rules: dict[str, object], culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        GrowthSettings(**rules)  # type: ignore[arg-type]


def test_a_budget_closes_what_would_exceed_it() -> None:
    task, data = small_digits(64)
    env = make_env(task.recipe(data), [1, 2], GrowthSettings(8, budget=Budget(params=1.1)))
    masks = env.reset().masks
    branch, small = (default_catalogue().index(name) for name in ("branch", "conv_small"))
    assert not masks.blueprint[:, :, branch].any()
    assert masks.blueprint[:, 0, small].all()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("looped", LoopedPopulation), ("fused", FusedPopulation)],
)
def test_the_rules_say_what_trains_the_hosts(kind: PopulationKind, expected: type) -> None:
    task, data = small_digits()
    env = make_env(task.recipe(data), iter([3, 4]), GrowthSettings(2, population=kind))
    assert type(env.population) is expected
    assert env.population.keys.tolist() == [3, 4]


def test_hosts_that_cannot_be_fused_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, data = small_digits()
    seen = []

    def why_not(recipe: HostRecipe, template: GrownModule) -> str:
        seen.append(type(template.host))
        return "they have dropout"

    monkeypatch.setattr("esper.tolaria.fused.choice.why_not_fused", why_not)
    with pytest.raises(ConfigError, match="cannot be fused: they have dropout; use population"):
        make_env(task.recipe(data), [0], GrowthSettings(2, population="fused"))
    assert seen == [CNNHost]


@pytest.mark.parametrize("topology", [(), ((0, 1),)])
@pytest.mark.parametrize("rate", [1e3, 1e20])
def test_a_fixed_network_that_diverges_ends_as_it_last_was_healthy(
    topology: tuple[tuple[int, int], ...], rate: float
) -> None:
    task, data = small_digits()
    recipe = replace(task.recipe(data), optimizer=lambda params: torch.optim.SGD(params, lr=rate))
    rules = GrowthSettings(3, counterfactuals="none", topology=topology)
    (found,) = play_run(recipe, [0], rules, StaticController(), task="digits")
    assert found.outcome.rollbacks > 0
    assert all(parameter.isfinite().all() for parameter in found.model.parameters())
