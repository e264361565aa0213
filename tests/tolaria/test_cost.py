"""What growth may cost: evaluations of an epoch and of the end, copies in memory, counting."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from architectures import ARCHITECTURES
from esper.growth.blueprints.catalogue import (
    count_params,
    default_catalogue,
    flop_counter,
    seed_costs,
)
from esper.growth.grown_module import GrownModule
from esper.growth.sites import UNKNOWN, inspect_model
from esper.leyline import ConfigError, SeedStage
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.situation import wait
from esper.tolaria.engine.run import GrowthEnv, play, settle
from helpers import digits_env

BRANCH = default_catalogue().index("branch")
KEPT = ((0, BRANCH), (1, BRANCH))
BOTH = pytest.mark.parametrize("kind", ["looped", "fused"])


class Count:
    """Counts the networks that a population evaluates."""

    def __init__(self, env: GrowthEnv) -> None:
        self.original, self.networks = env.population.evaluate, 0
        env.population.evaluate = self.evaluate  # type: ignore[method-assign]

    def evaluate(self, envs: np.ndarray, present: np.ndarray) -> Any:
        self.networks += len(envs)
        return self.original(envs, present)

    def taken(self) -> int:
        found, self.networks = self.networks, 0
        return found


@BOTH
@pytest.mark.parametrize(
    ("settings", "evaluated"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"audit_every": 2}, [1, 3, 1, 3, 1]),
        ({"counterfactuals": "all"}, [3, 3, 3, 3, 3]),
        ({"counterfactuals": "none", "audit_every": 2}, [1, 1, 1, 1, 1]),
    ],
)
def test_kept_seeds_are_left_out_only_for_an_audit(
    settings: dict[str, Any], evaluated: list[int], kind: str
) -> None:
    env = digits_env([3], 9, train=64, kind=kind, topology=KEPT, **settings)
    count, found = Count(env), []
    env.reset()
    found.append(count.taken())
    for _ in range(4):
        env.step(wait(1))
        found.append(count.taken())
    assert found == evaluated


@BOTH
def test_a_contribution_stays_as_it_was_measured_on_trial(kind: str) -> None:
    env = digits_env([1], 12, kind=kind)
    controller = ScriptedController("1 GERMINATE r0c0 branch linear\nauto FOSSILIZE", "x")
    on_trial, kept = [], []
    situation = env.reset()
    while situation.running.any():
        situation = env.step(controller.act(situation)).after
        stage, worth = situation.table.stage[0, 0], situation.table.contribution[0, 0]
        (kept if stage == SeedStage.FOSSILIZED else on_trial).append(worth)
    assert len(kept) > 1
    assert set(kept) == {on_trial[-1]}


@BOTH
@pytest.mark.parametrize("keep_best", [True, False])
def test_the_end_costs_no_evaluation_where_nothing_is_removed(kind: str, keep_best: bool) -> None:
    env = digits_env([3], 4, train=64, kind=kind, topology=KEPT, keep_best=keep_best)
    play(env, ScriptedController("", "x"))
    count = Count(env)
    (outcome,) = settle(env, np.ones(1, dtype=bool), task="digits", controller="x")
    assert count.taken() == 0
    again = env.population.evaluate(np.array([0]), np.ones((1, 3), dtype=bool))
    assert outcome.val_score == pytest.approx(again.score[0])
    assert outcome.val_loss == pytest.approx(again.loss[0])


def test_the_end_costs_one_evaluation_if_a_seed_is_removed() -> None:
    script = "1 GERMINATE r0c0 branch linear\n2 GERMINATE r0c1 conv_light linear\n"
    env = digits_env([3], 8, train=64, keep_best=True)
    play(env, ScriptedController(script, "x"))
    assert env.best[0] is not None
    acts = env.best[0].row.stage[0, 0] >= SeedStage.BLENDING
    env.best[0].row.contribution[:] = -1.0
    count = Count(env)
    (outcome,) = settle(env, np.ones(1, dtype=bool), task="digits", controller="x")
    assert count.taken() == acts == 1
    assert not outcome.seeds
    again = env.population.evaluate(np.array([0]), np.ones((1, 3), dtype=bool))
    assert outcome.val_score == again.score[0]


# --- memory --------------------------------------------------------------------------------------


def held(env: GrowthEnv) -> float:
    """Bytes of all snapshots, over those of the network's weights."""
    tensors: dict[int, Tensor] = {}
    for saved in (env.best[0], env.governor.saved[0]):
        if saved is not None and saved.host is not None:
            tensors |= {each.data_ptr(): each for each in saved.host.all_tensors()}
    network = env.population.network(0)
    weights = sum(each.nbytes for each in [*network.parameters(), *network.buffers()])
    return sum(each.nbytes for each in tensors.values()) / weights


def test_snapshots_hold_twice_the_weights_or_three_times() -> None:
    """Weights and two halved moments; weights once more if the best epoch is not the last healthy
    one."""
    env = digits_env([3], 8, train=64, topology=KEPT, keep_best=True)
    env.reset()
    for better in (True, False, False, True):
        env.best_score[:] = -np.inf if better else np.inf
        env.step(wait(1))
        assert held(env) == pytest.approx(2.0 if better else 3.0, rel=0.02)


def test_a_new_snapshot_is_written_over_the_old_one() -> None:
    env = digits_env([3], 8, train=64, keep_best=True)
    env.reset()
    env.best_score[:] = np.inf
    env.step(wait(1))
    places = []
    for _ in range(2):
        saved = env.governor.last_healthy(0).host
        assert saved is not None
        places.append({tensor.data_ptr() for tensor in saved.all_tensors()})
        env.step(wait(1))
    assert places[0] == places[1]


def test_without_snapshots_nothing_is_copied_and_the_last_network_is_returned() -> None:
    env = digits_env([3], 6, train=64, snapshots="none")
    play(env, ScriptedController("", "x"))
    assert held(env) == 0.0
    last = [p.clone() for p in env.population.network(0).parameters()]
    (outcome,) = settle(env, np.ones(1, dtype=bool), task="digits", controller="x")
    assert outcome.best_step == outcome.steps == 6
    assert outcome.val_score == env.score[0]
    now = env.population.network(0).parameters()
    assert all(torch.equal(one, other) for one, other in zip(last, now, strict=True))


def test_without_snapshots_a_broken_network_ends_the_run() -> None:
    env = digits_env([3], 6, train=64, snapshots="none", on_panic="continue")
    env.reset()
    with torch.no_grad():
        env.population.network(0).host.head.weight.fill_(torch.nan)
    transition = env.step(wait(1))
    assert transition.terminated[0]
    assert not transition.rolled_back[0]
    (outcome,) = settle(env, np.ones(1, dtype=bool), task="digits", controller="x")
    assert outcome.val_loss is None
    assert outcome.rollbacks == 0


@pytest.mark.parametrize("name", ["audit_every", "patience"])
def test_what_needs_snapshots_is_refused_without(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs copies of earlier networks"):
        GrowthSettings(9, snapshots="none", **{name: 2})


# --- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_costs_of_seeds_are_those_of_each_one_counted_by_itself(name: str) -> None:
    build, _, _, make_example = ARCHITECTURES[name]
    model, example = build(), make_example()
    usable = [slot.name for slot in inspect_model(model, example).slots if slot.layout != UNKNOWN]
    network = GrownModule.wrap(model, usable, example)
    fits, params, macs = seed_costs(network.catalogue, network.sites, network.output)
    for s, site in enumerate(network.sites):
        for b, spec in enumerate(network.catalogue.specs):
            try:
                seed = spec.build(site, network.output)
            except ConfigError:
                assert (fits[s, b], params[s, b], macs[s, b]) == (False, 0, 0)
                continue
            with flop_counter() as counter, torch.no_grad():
                seed.eval()(torch.zeros(spec.reads(site, 1)))
            found = counter.get_total_flops() // 2
            bypass = spec.kind == "bypass"
            found = found // site.widening.batch if bypass else found * site.calls
            assert (fits[s, b], params[s, b], macs[s, b]) == (True, count_params(seed), found)
