"""Whole episodes through `GrowthEnv` have the same events with both populations."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fused_support import recipe
from torch import Tensor, nn

from esper.growth.blueprints.catalogue import BlueprintCatalogue, default_catalogue
from esper.leyline import History, SeedStage
from esper.leyline.events import (
    Event,
    GovernorPanic,
    GovernorRollback,
    GovernorSnapshot,
    SeedCulled,
    SeedGerminated,
    SeedStageChanged,
)
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.controllers.simple import RandomController, StaticController
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthEnv, play, settle
from esper.tolaria.fused.population import FusedPopulation
from helpers import episode_settings, everywhere


class Log(History):
    def comparable(self) -> list[tuple[Any, ...]]:
        """Events without the numbers that rounding may change, and without snapshots, whose tensors
        are cut differently."""
        return [
            (type(event).__name__, *(v for v in vars(event).values() if not isinstance(v, float)))
            for event in self.events
            if not isinstance(event, GovernorSnapshot)
        ]


def environments(
    made: HostRecipe, n_envs: int, rules: GrowthSettings
) -> list[tuple[GrowthEnv, Log]]:
    found = []
    for make in (LoopedPopulation, FusedPopulation):
        log = Log()
        env = GrowthEnv(
            make(made, range(n_envs)),
            rules,
            random_guess_loss=math.log(10),
            recorder=log,
        )
        found.append((env, log))
    return found


def kinds(log: Log) -> set[type[Event]]:
    return {type(event) for event in log.events}


def assert_same_events(both: list[tuple[GrowthEnv, Log]], scores: float) -> None:
    (looped, expected), (fused, found) = both
    assert found.comparable() == expected.comparable()
    assert np.array_equal(fused.table.stage, looped.table.stage)
    assert np.array_equal(fused.running, looped.running)
    assert np.array_equal(fused.garden.total_params(), looped.garden.total_params())
    np.testing.assert_allclose(fused.garden.train_macs, looped.garden.train_macs)
    assert np.nanmean(np.abs(fused.score - looped.score)) <= scores


SCRIPT = """
1 GERMINATE r0c0 branch gated
2 GERMINATE r0c1 conv_heavy linear
3 GERMINATE r0c2 depthwise sigmoid
5 CULL r0c2
auto FOSSILIZE
"""


@pytest.mark.parametrize("incubation", ["isolated", "joint"])
def test_a_scripted_episode(incubation: Any) -> None:
    both = environments(recipe(), 4, episode_settings(16, incubation=incubation, keep_best=True))
    for env, _ in both:
        assert play(env, ScriptedController(SCRIPT, "test"))
    assert {SeedGerminated, SeedStageChanged, SeedCulled} <= kinds(both[0][1])
    assert_same_events(both, scores=3.0)
    outcomes = [
        settle(env, np.ones(4, dtype=bool), task="t", controller="c", attribute=True)
        for env, _ in both
    ]
    for looped, fused in zip(*outcomes, strict=True):
        assert fused.macs == looped.macs
        assert fused.val_score == pytest.approx(looped.val_score, abs=3.0)
        assert [seed.slot_id for seed in fused.seeds] == [seed.slot_id for seed in looped.seeds]


@pytest.mark.parametrize("host", ["cnn", "mlp"])
def test_random_episodes(host: str) -> None:
    both = environments(recipe(host), 6, episode_settings(14))
    for env, _ in both:
        assert play(env, RandomController())
    assert {SeedGerminated, SeedStageChanged, SeedCulled} <= kinds(both[0][1])
    assert_same_events(both, scores=3.0)


def test_seeds_from_birth() -> None:
    catalogue = default_catalogue()
    topology = ((0, catalogue.index("branch")), (2, catalogue.index("attention")))
    both = environments(recipe(), 3, episode_settings(3, topology=topology))
    for env, _ in both:
        assert play(env, StaticController())
    assert_same_events(both, scores=0.5)
    assert (both[1][0].table.stage[:, 0] == SeedStage.FOSSILIZED).all()


class Cliff(nn.Module):
    """Gives NaN as soon as its weight has moved by 0.045, after five batches or so."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.01 * torch.atanh(self.weight / 0.045)


def cliffs() -> BlueprintCatalogue:
    return default_catalogue().with_blueprint(everywhere("cliff", Cliff))


@pytest.mark.parametrize("on_panic", ["terminate", "continue"])
def test_a_rollback(on_panic: Any) -> None:
    made = replace(recipe(), catalogue=cliffs())
    both = environments(made, 3, episode_settings(8, incubation="joint", on_panic=on_panic))
    script = ScriptedController("2 GERMINATE r0c1 cliff linear\nauto FOSSILIZE", "test")
    for env, _ in both:
        assert play(env, script)
    log = both[1][1]
    assert {GovernorPanic, GovernorRollback} <= kinds(log)
    assert_same_events(both, scores=1.0)
    assert np.isfinite(both[1][0].score).all()
    culprits = [event for event in log.events if isinstance(event, GovernorRollback)]
    assert {event.culprit_slots for event in culprits} == {("r0c1",)}


def test_a_host_that_breaks_by_itself_is_brought_back_with_rounded_moments() -> None:
    (_, _), (env, log) = environments(recipe(), 3, episode_settings(6, on_panic="continue"))
    population = env.population
    assert isinstance(population, FusedPopulation)
    env.reset()
    healthy = population.hosts[1]
    population.hosts[1] = replace(healthy, values=healthy.values * torch.nan)
    transition = env.step(StaticController().act(env.situation))
    assert transition.rolled_back.tolist() == [False, True, False]
    weights, *moments = healthy.values
    assert torch.equal(population.hosts[1].values[0], weights)
    for restored, moment in zip(population.hosts[1].values[1:], moments, strict=True):
        assert torch.equal(restored, moment.bfloat16().float())
    assert population.hosts[1].steps == healthy.steps
    assert population.hosts[0].steps == 2 * healthy.steps
    assert GovernorRollback in kinds(log)
