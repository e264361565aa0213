"""Findings about contracts, features, governor and lifecycle."""

import ast
import gc
import inspect
from pathlib import Path

import numpy as np
import torch

import esper
from esper.growth import HostSnapshot
from esper.leyline import HEAD_NAMES, HEAD_RELEVANCE, RELEVANT_HEADS, LifecycleOp, SlotConfig
from esper.tamiyo import FeatureExtractionContext, SignalTracker, make_controller
from esper.tamiyo.policy.features import signals_to_features
from esper.tolaria.episode import run_episode
from esper.tolaria.governor import Governor
from helpers import digits_env

SOURCES = sorted(Path(esper.__file__).parent.rglob("*.py"))


def test_001_l1_features_take_one_context_object() -> None:
    assert list(inspect.signature(signals_to_features).parameters) == ["context"]


def test_001_l2_the_context_has_no_unused_parameter() -> None:
    env = digits_env([1], max_steps=1, train=64)
    situation = env.reset()
    fields = inspect.signature(FeatureExtractionContext).parameters
    assert "max_epochs" not in fields
    widths = {
        use: signals_to_features(FeatureExtractionContext(situation, use_telemetry=use)).shape[1]
        for use in (True, False)
    }
    assert widths[True] > widths[False]


def test_002_low2_membership_of_heads_does_not_depend_on_order() -> None:
    assert all(isinstance(heads, frozenset) for heads in RELEVANT_HEADS.values())
    for op in LifecycleOp:
        for head, name in enumerate(HEAD_NAMES):
            assert HEAD_RELEVANCE[op, head] == (name in RELEVANT_HEADS[op])


def test_003_networks_torch_is_imported_without_conditions() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Try):
                imported = {
                    alias.name.split(".")[0]
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Import)
                    for alias in inner.names
                }
                assert "torch" not in imported, path
            assert not (isinstance(node, ast.Name) and node.id == "TORCH_AVAILABLE"), path


def test_004_c7_one_snapshot_alive_on_the_cpu_without_shared_storage() -> None:
    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if type(thing) is HostSnapshot}
    env = digits_env([1], max_steps=6, train=64)
    run_episode(env, make_controller("random"))
    gc.collect()
    alive = [t for t in gc.get_objects() if type(t) is HostSnapshot and id(t) not in before]
    assert len(alive) == 1
    network = env.population.networks[0]  # type: ignore[attr-defined]
    live = {tensor.untyped_storage().data_ptr() for tensor in network.state_dict().values()}
    for tensor in alive[0].all_tensors():
        assert tensor.device == torch.device("cpu")
        assert tensor.untyped_storage().data_ptr() not in live


def test_004_m10_the_default_slots_are_made_once() -> None:
    assert SlotConfig.default() is SlotConfig.default()


def test_d4_a_broken_host_never_becomes_the_last_healthy_one() -> None:
    env = digits_env([1], max_steps=6, train=64, on_panic="continue")
    env.reset()
    with torch.no_grad():
        next(env.population.networks[0].parameters()).fill_(torch.nan)  # type: ignore[attr-defined]
    transition = env.step(np.array([[0, 0, 0, LifecycleOp.WAIT]]))
    assert transition.rolled_back[0]
    saved = env.governor.last_healthy(0)
    assert all(bool(torch.isfinite(t).all()) for t in saved.host.all_tensors())


def test_d5_after_a_rollback_modules_and_table_agree() -> None:
    env = digits_env([1], max_steps=8, train=64, on_panic="continue")
    situation = env.reset()
    branch = situation.catalogue.index("branch")
    env.step(np.array([[0, branch, 0, LifecycleOp.GERMINATE]]))
    network = env.population.networks[0]  # type: ignore[attr-defined]
    with torch.no_grad():
        next(network.host.parameters()).fill_(torch.nan)
    after = env.step(np.array([[0, 0, 0, LifecycleOp.WAIT]])).after
    for slot, seed_slot in network.each_slot():
        assert (seed_slot.seed is not None) == after.table.holds_seed[0, slot]


def test_d6_panics_are_counted_and_early_explosions_seen() -> None:
    governor = Governor(1, random_guess_loss=2.3)
    one = np.ones(1, dtype=bool)
    counts = []
    for _ in range(3):
        verdict = governor.check(np.array([40.0]), np.array([10.0]), one, one, ~one)
        counts.append(int(verdict.consecutive[0]))
    assert counts == [1, 2, 3]
    assert verdict.rollback[0]


def test_d28_no_stabilisation_epochs_open_the_gate_at_once() -> None:
    assert SignalTracker(2, stabilization_epochs=0).stabilized.all()
