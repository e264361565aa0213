"""Findings about the telemetry of learning and attribution: one test each."""

import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from esper.leyline import BLUEPRINT, HEAD_NAMES, OP, LifecycleOp, SeedStage
from esper.leyline import constants as c
from esper.simic.telemetry import (
    AnomalyDetector,
    AnomalyThresholds,
    DeviceTimer,
    Escalation,
    GradientEMATracker,
    GradientThresholds,
    RatioExplosionDiagnostic,
    TelemetryConfig,
    TelemetryLevel,
    check_numerical_stability,
    collect_gradients,
    collect_per_layer_gradients,
    compute_lstm_health,
    profiler,
    summarize_layers,
    training_profiler,
)
from esper.tamiyo import FeatureExtractionContext, signals_to_features, wait
from esper.tolaria.attribution import CoalitionGame, attribute, attribute_seeds
from reward_support import one_seed, situation, small_env


def layers(n=4):
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(n)))
    for i, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (i + 1))
    return module


def row(**changed):
    healthy = {f"{head}_entropy": 0.5 for head in HEAD_NAMES}
    return healthy | {"steps": 10, "skipped": None, "approx_kl_max": 0.01} | changed


def look_twice(metrics):
    detector = AnomalyDetector()
    for _ in range(2):
        report = detector.check_update(metrics, current_round=5, total_rounds=10)
    return report


@pytest.fixture
def reads(monkeypatch):
    seen = []
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, _name=name, _original=original, **kwargs):
            seen.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    return seen


def test_004_c6_counting_needs_no_loop_over_tensors_and_equals_a_naive_count(reads):
    module = layers(20)
    grads = [p.grad for p in module.parameters()]
    grads[3].view(-1)[:2] = math.nan
    grads[5].view(-1)[0] = math.inf
    grads[7].zero_()
    found = collect_gradients(module.parameters(), GradientThresholds.for_clip_norm(0.5))
    assert reads == ["tolist"]
    flat = torch.cat([grad.flatten() for grad in grads])
    assert found.nan_count == int(flat.isnan().sum()) == 2
    assert found.inf_count == int(flat.isinf().sum()) == 1
    assert found.zero_fraction == pytest.approx(float((flat == 0).float().mean()))


@pytest.mark.parametrize("head", HEAD_NAMES)
@pytest.mark.parametrize(
    ("entropy", "expected"), [(0.05, "entropy_collapse"), (0.2, "entropy_low"), (0.5, None)]
)
def test_004_h1_entropy_is_watched_for_each_head_and_escalates(head, entropy, expected):
    report = look_twice(row(**{f"{head}_entropy": entropy}))
    assert report.anomaly_types == (() if expected is None else (expected,))
    escalation = Escalation()
    escalation.note(bool(report.new))
    assert escalation.wants(TelemetryLevel.DEBUG) == (expected is not None)


@pytest.mark.parametrize(("kl", "expected"), [(0.2, "kl_spike"), (0.6, "kl_extreme"), (0.05, None)])
def test_004_h2_kl_is_watched(kl, expected):
    found = look_twice(row(approx_kl_max=kl)).anomaly_types
    assert found == (() if expected is None else (expected,))


def test_004_h14_thresholds_follow_the_clip_norm_in_use():
    module = layers()
    module[0].weight.grad.fill_(4.0)  # norm 12
    for clip, exploding in ((0.5, True), (2.0, False)):
        thresholds = GradientThresholds.for_clip_norm(clip)
        assert thresholds.exploding == 10 * clip
        assert collect_gradients(module.parameters(), thresholds).has_exploding == exploding
    with pytest.raises(TypeError):
        collect_gradients(module.parameters())


def test_004_m11_collapse_uses_the_shared_constant_and_a_number_between_zero_and_one():
    assert AnomalyThresholds().entropy_collapse == c.ENTROPY_COLLAPSE_THRESHOLD == 0.1
    assert look_twice(row(op_entropy=0.0999)).anomaly_types == ("entropy_collapse",)
    assert look_twice(row(op_entropy=0.1001)).anomaly_types == ("entropy_low",)


def test_004_m13_the_stability_report_carries_the_norm_before_clipping():
    module = layers()
    norm = float(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
    report = check_numerical_stability(module, loss=1.0, pre_clip_grad_norm=norm)
    clipped = math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters()))
    assert report.pre_clip_grad_norm == norm
    assert norm > 0.5 >= clipped - 1e-6


def test_004_m14_lstm_health_reads_the_device_once(reads):
    h, cell = torch.rand(1, 8, 16), torch.rand(1, 8, 16)
    compute_lstm_health((h, cell))
    assert reads == ["tolist"]


def test_004_m15_the_profiler_traces_what_this_machine_has(tmp_path, monkeypatch):
    asked = {}

    class Profile:
        def __init__(self, **options):
            asked.update(options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(profiler, "profile", Profile)
    monkeypatch.setattr(profiler, "supported_activities", lambda: {"cpu", "xpu"})
    with training_profiler(tmp_path):
        pass
    assert set(asked["activities"]) == {"cpu", "xpu"}


def test_004_m16_profiles_lie_in_the_run_directory_by_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []
    monkeypatch.setattr(profiler, "tensorboard_trace_handler", folders.append)
    with training_profiler(Path("runs/one")):
        pass
    assert folders == [str(tmp_path / "runs" / "one" / "profile")]


def test_004_m21_ratio_limits_are_settings_of_detector_and_diagnostic():
    strict = AnomalyDetector(AnomalyThresholds(ratio_max=2.0, patience=1))
    found = strict.check_update(row(ratio_max=3.0), current_round=1, total_rounds=2)
    assert found.anomaly_types == ("ratio_explosion",)
    assert not look_twice(row(ratio_max=3.0)).has_anomaly
    change, ones = torch.full((1, 4), math.log(3.0)), torch.ones(1, 4, dtype=torch.bool)
    arguments = torch.zeros(1, 4), change, ones, torch.zeros(1, 4)
    assert not RatioExplosionDiagnostic.from_batch(*arguments).steps
    assert RatioExplosionDiagnostic.from_batch(*arguments, max_ratio=2.0).steps


def test_004_gap2_ema_drift_is_detected():
    tracker, detector = GradientEMATracker(), AnomalyDetector()
    for norm in [1.0] * 20 + [2.0] * 2:
        drift = tracker.update(norm, 1.0)
        report = detector.check_all(current_round=1, total_rounds=2, norm_drift=drift.norm)
    assert report.anomaly_types == ("gradient_norm_drift",)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_004_gap3_lstm_health_of_edge_cases(value):
    assert compute_lstm_health(None) is None
    h = torch.ones(1, 2, 3)
    h[0, 1, 2] = value
    found = compute_lstm_health((h, torch.ones(1, 2, 3)))
    assert found.unhealthy_envs == (1,)
    assert (found.has_nan, found.has_inf) == (math.isnan(value), math.isinf(value))


def test_001_l4_the_ratio_diagnostic_examines_every_head():
    for index, head in enumerate(HEAD_NAMES):
        change = torch.zeros(6, 4)
        change[2, index] = 3.0
        relevant = torch.ones(6, 4, dtype=torch.bool)
        found = RatioExplosionDiagnostic.from_batch(
            torch.zeros(6, 4), change, relevant, torch.zeros(6, 4)
        )
        assert found.worst_head == head
        relevant[2, index] = False
        quiet = RatioExplosionDiagnostic.from_batch(
            torch.zeros(6, 4), change, relevant, torch.zeros(6, 4)
        )
        assert quiet.outliers[head] == 0


def test_002_high1_timing_waits_for_the_device(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waits.append(device.type))
    with DeviceTimer("cuda"):
        pass
    assert waits == ["cuda", "cuda"]


def test_002_low4_the_ratio_diagnostic_uses_every_argument():
    source = inspect.getsource(RatioExplosionDiagnostic.from_batch)
    body = source.partition('"""All')[2]
    for name in inspect.signature(RatioExplosionDiagnostic.from_batch).parameters:
        assert name in body


def six_steps_with(blueprint):
    """A small environment six steps after the seed germinated, and its situation."""
    env = small_env([2], steps=12)
    state = env.reset()
    for step in range(6):
        actions = wait(1)
        if step == 0:
            actions[0, OP] = LifecycleOp.GERMINATE
            actions[0, BLUEPRINT] = state.catalogue.index(blueprint)
        state = env.step(actions).after
    return env, state


def test_d7_the_lifecycle_does_not_depend_on_telemetry():
    """Gates read what the population measures; no level of telemetry reaches the environment."""
    env, state = six_steps_with("mlp_small")
    assert state.table.gradient_ratio[0, 0] > 0
    assert not np.isnan(state.table.contribution[0, 0])
    assert not any("telemetry" in name for name in inspect.signature(type(env)).parameters)
    assert TelemetryConfig(TelemetryLevel.OFF).level == TelemetryLevel.OFF


def test_d15_layer_health_is_measured_and_a_missing_one_is_none():
    assert summarize_layers(collect_per_layer_gradients(layers())).layer_gradient_health == 1.0
    dead = layers()
    dead[0].weight.grad.zero_()
    found = summarize_layers(collect_per_layer_gradients(dead))
    assert found.layer_gradient_health == pytest.approx(1 - 0.5 / 8)
    assert summarize_layers([]) is None


def test_d18_gradient_health_is_real():
    thresholds = GradientThresholds.for_clip_norm(0.5)
    module = layers()
    assert collect_gradients(module.parameters(), thresholds).health == 1.0
    module[1].weight.grad.zero_()
    assert collect_gradients(module.parameters(), thresholds).health == pytest.approx(1 - 0.5 / 8)


@pytest.mark.parametrize("norm", [1e-8, 1.0, 11.0])
def test_d18_the_observation_shows_the_health_that_was_measured(norm):
    table = one_seed(SeedStage.TRAINING, n=1)
    table.gradient_health[0, 0], table.gradient_norm[0, 0] = 0.25, norm
    context = FeatureExtractionContext(situation(table))
    telemetry = signals_to_features(context)[0, -10:]
    assert telemetry[1] == 0.25
    flags = norm < c.SEED_VANISHING_NORM, norm > c.SEED_EXPLODING_NORM
    assert tuple(telemetry[2:4]) == flags


def test_d27_shapley_values_are_real_evaluations_with_a_full_payload():
    asked = []

    def evaluate(members):
        asked.append(len(members))
        return members.sum(axis=1).astype(float)

    found = attribute(CoalitionGame(9, evaluate), key=3, pairs=5)
    # Nine players have 362,880 orders and 512 coalitions.
    assert sum(asked) == found.evaluations < 150
    env, _ = six_steps_with("branch")
    _, event = attribute_seeds(env, 0)
    assert (event.env, event.step, event.slot_ids) == (0, 6, ("r0c0",))
    assert event.shapley == pytest.approx(event.leave_one_out)
