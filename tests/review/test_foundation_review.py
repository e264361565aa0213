"""Findings about contracts, features, governor and lifecycle."""

import ast
import gc
import inspect
from pathlib import Path

import numpy as np
import torch

import esper
import esper.simic.control.normalization as normalization
from esper.growth import HostSnapshot
from esper.leyline import HEAD_NAMES, HEAD_RELEVANCE, RELEVANT_HEADS, LifecycleOp, SlotConfig
from esper.leyline.events import GovernorPanic, GovernorRollback, GovernorSnapshot
from esper.tamiyo import FeatureExtractionContext, SignalTracker, make_controller
from esper.tamiyo.policy.features import signals_to_features
from esper.tolaria.governor import Governor
from esper.tolaria.trial import run_episode
from helpers import digits_env
from reward_support import Keeper, break_host

GOVERNOR_EVENTS = (GovernorPanic, GovernorRollback, GovernorSnapshot)

PACKAGE = Path(esper.__file__).parent
TREES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}


def test_001_l1_features_take_one_context_object() -> None:
    assert list(inspect.signature(signals_to_features).parameters) == ["context"]


def test_001_l2_the_context_has_no_unused_parameter() -> None:
    body = ast.parse(inspect.getsource(signals_to_features))
    read = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "context"
    }
    assert read == set(inspect.signature(FeatureExtractionContext).parameters)


def test_002_low2_membership_of_heads_does_not_depend_on_order() -> None:
    assert all(isinstance(heads, frozenset) for heads in RELEVANT_HEADS.values())
    for op in LifecycleOp:
        for head, name in enumerate(HEAD_NAMES):
            assert HEAD_RELEVANCE[op, head] == (name in RELEVANT_HEADS[op])


def imports(tree: ast.AST) -> set[str]:
    """Names of the modules that are imported anywhere below."""
    nodes = list(ast.walk(tree))
    plain = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_003_networks_m1_torch_is_imported_without_conditions() -> None:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Try | ast.If):
                assert "torch" not in imports(node), path
            assert not (isinstance(node, ast.Name) and node.id == "TORCH_AVAILABLE"), path


def test_003_networks_l1_torch_is_imported_at_the_top_of_a_module() -> None:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert "torch" not in imports(node), (path, node.name)


def test_003_ppo_m2_nothing_that_is_read_can_run_code() -> None:
    unpicklers = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    for path, tree in TREES.items():
        assert not imports(tree) & unpicklers, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "np.load", "eval", "exec"), path


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


def test_004_h12_there_is_no_gradient_scaler() -> None:
    """Nothing scales a loss, so nothing has to be kept in step with what does."""
    for path, tree in TREES.items():
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)}
        assert "GradScaler" not in names, path


def test_004_h13_one_thread_is_documented_and_no_other_is_started() -> None:
    assert "one thread only" in str(normalization.__doc__)
    for path, tree in TREES.items():
        assert not imports(tree) & {"threading", "_thread", "concurrent.futures"}, path


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


def test_d6_panics_rollbacks_and_snapshots_are_told() -> None:
    keeper = Keeper()
    env = digits_env([1], max_steps=4, train=64, recorder=keeper)
    env.reset()
    break_host(env, 0)
    env.step(np.array([[0, 0, 0, LifecycleOp.WAIT]]))
    told = [type(event) for event in keeper.events if isinstance(event, GOVERNOR_EVENTS)]
    # At birth and after the warm-up; then the broken epoch, and the host that was brought back.
    assert told == [
        GovernorSnapshot,
        GovernorSnapshot,
        GovernorPanic,
        GovernorRollback,
        GovernorSnapshot,
    ]
    (panic,) = [event for event in keeper.events if isinstance(event, GovernorPanic)]
    assert (panic.env, panic.step, panic.consecutive_panics) == (0, 1, 1)


def test_d32_what_watches_over_training_uses_public_names_and_hides_no_error() -> None:
    watching = [p for p in TREES if p.startswith(("tolaria/", "simic/telemetry/"))]
    assert len(watching) > 20
    for path in watching:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ExceptHandler):
                caught = "" if node.type is None else ast.unparse(node.type)
                assert caught not in ("", "Exception", "BaseException"), path
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "torch"):
                private = node.attr.startswith("_") and not node.attr.endswith("__")
                assert not private, (path, node.attr)


def test_d28_no_stabilisation_epochs_open_the_gate_at_once() -> None:
    assert SignalTracker(2, stabilization_epochs=0).stabilized.all()
