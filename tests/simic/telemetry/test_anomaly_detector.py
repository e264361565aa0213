"""Each detector fires on its failure and is silent while learning is healthy."""

import math

import numpy as np
import pytest
import torch

from esper.leyline import HEAD_NAMES, ConfigError
from esper.leyline import constants as c
from esper.simic.telemetry.anomaly_detector import (
    LIMITS,
    AnomalyDetector,
    AnomalyThresholds,
    Escalation,
    value_threshold,
)
from esper.simic.telemetry.debug_telemetry import RatioExplosionDiagnostic
from esper.simic.telemetry.health import GradientEMATracker

HEALTHY = {
    "ratio_max": 1.4,
    "ratio_min": 0.7,
    "explained_variance": 0.5,
    **{f"{head}_entropy": 0.6 for head in HEAD_NAMES},
    "approx_kl_max": 0.01,
    "policy_loss": -0.01,
    "value_loss": 0.3,
    "steps": 100,
    "skipped": None,
    "lstm_unhealthy_envs": 0,
}
DRIFT = {"norm_drift": 0.1, "health_drift": 0.0}
FAILURES = {
    "ratio_explosion": {"ratio_max": 6.0},
    "ratio_collapse": {"ratio_min": 0.05},
    "value_collapse": {"explained_variance": -0.3},
    "numerical_instability": {"policy_loss": float("nan")},
    "entropy_collapse": {"op_entropy": 0.05},
    "entropy_low": {"blueprint_entropy": 0.2},
    "kl_extreme": {"approx_kl_max": 0.6},
    "kl_spike": {"approx_kl_max": 0.2},
    "gradient_norm_drift": {"norm_drift": 0.8},
    "gradient_health_drift": {"health_drift": 0.8},
    "lstm_unhealthy": {"lstm_unhealthy_envs": 2},
}
AT_ONCE = ("numerical_instability", "kl_extreme")


def check(detector, current=50, **changed):
    return detector.check_all(HEALTHY | DRIFT | changed, current_round=current, total_rounds=100)


def test_every_anomaly_has_a_failure_here():
    limited = {name.partition(":")[0] for name, *_ in LIMITS}
    assert set(FAILURES) == limited | {"numerical_instability", "lstm_unhealthy"}


@pytest.mark.parametrize("name", FAILURES)
def test_each_detector_fires_on_its_failure_and_on_nothing_else(name):
    detector = AnomalyDetector()
    first = check(detector, **FAILURES[name])
    assert first.anomaly_types == ((name,) if name in AT_ONCE else ())
    second = check(detector, **FAILURES[name])
    assert second.anomaly_types == (name,)
    (event,) = (first if name in AT_ONCE else second).events(update=7)
    assert (event.anomaly, event.env, event.step) == (name, -1, 7)
    assert event.detail
    # One event, however long it lasts.
    assert check(detector, **FAILURES[name]).new == ()


@pytest.mark.parametrize("name", FAILURES)
def test_an_anomaly_ends_after_as_many_good_updates(name):
    detector = AnomalyDetector()
    for _ in range(3):
        check(detector, **FAILURES[name])
    assert check(detector).anomaly_types == (name,)
    assert not check(detector).has_anomaly


@pytest.mark.parametrize("name", [name for name in FAILURES if name not in AT_ONCE])
def test_one_noisy_update_does_not_cry_wolf(name):
    detector = AnomalyDetector()
    for update in range(200):
        changed = FAILURES[name] if update % 3 == 0 else {}
        assert not check(detector, **changed).has_anomaly


def healthy_updates(key, n=200):
    """What a run that learns looks like: noisy, entropy falling, critic improving."""
    draw = np.random.default_rng(key)
    for i in range(1, n + 1):
        progress = i / n
        noise = draw.normal(size=8)
        outlier = 3.0 if draw.random() < 0.02 else 1.0
        entropy = 0.95 - 0.5 * progress + 0.03 * noise[0]
        yield (
            i,
            {
                "ratio_max": 1.0 + 0.6 * abs(noise[1]) * outlier,
                "ratio_min": float(np.exp(-0.4 * abs(noise[2]))),
                "explained_variance": -0.2 + 0.9 * progress**0.5 + 0.05 * noise[3],
                **{f"{head}_entropy": entropy for head in ("op", "slot", "blend")},
                "blueprint_entropy": None,
                "approx_kl_max": 0.012 * abs(noise[4]) * outlier,
                "policy_loss": noise[5],
                "value_loss": abs(noise[6]),
            },
            float(0.4 * np.exp(0.15 * noise[7])),
        )


@pytest.mark.parametrize("key", range(5))
def test_two_hundred_healthy_updates_are_silent(key):
    detector, tracker = AnomalyDetector(), GradientEMATracker()
    for i, metrics, norm in healthy_updates(key):
        drift = tracker.update(norm, 1.0)
        report = detector.check_all(metrics | drift, current_round=i, total_rounds=200)
        assert not report.has_anomaly, report.details


def test_what_was_not_measured_is_neither_good_nor_bad():
    detector = AnomalyDetector()
    report = detector.check_all({}, current_round=1, total_rounds=10)
    assert not report.has_anomaly
    assert set(detector.bad_in_a_row) == {"numerical_instability"}
    for kl in (0.2, None, 0.2):
        report = detector.check_all({"approx_kl_max": kl}, current_round=1, total_rounds=10)
    assert report.anomaly_types == ("kl_spike",)


def test_every_head_has_an_anomaly_of_its_own():
    detector = AnomalyDetector()
    for _ in range(2):
        report = check(detector, op_entropy=0.05, slot_entropy=0.2, blend_entropy=0.5)
    assert set(report.details) == {"entropy_collapse:op", "entropy_low:slot"}
    assert {event.worst_head for event in report.events(1)} == {"op", "slot"}


@pytest.mark.parametrize(
    ("current", "least"), [(1, -0.5), (9, -0.5), (10, -0.2), (24, -0.2), (25, 0.0), (75, 0.1)]
)
def test_a_critic_has_to_explain_more_the_longer_it_learned(current, least):
    assert value_threshold(current, 100, AnomalyThresholds()) == least
    assert value_threshold(100, 100, AnomalyThresholds()) == 0.1


@pytest.mark.parametrize(("current", "total"), [(0, 10), (1, 0), (-1, 10)])
def test_episodes_are_counted_from_one(current, total):
    with pytest.raises(ValueError, match="counted from 1"):
        AnomalyDetector().check_all({}, current_round=current, total_rounds=total)


def test_thresholds_are_settings():
    strict = AnomalyDetector(AnomalyThresholds(patience=1), ratios=(0.1, 1.2))
    assert check(strict).anomaly_types == ("ratio_explosion",)
    low = AnomalyDetector(AnomalyThresholds(entropy_low=0.4, kl_spike=0.04, patience=1))
    found = check(low, op_entropy=0.35, approx_kl_max=0.05).details
    assert set(found) == {"entropy_low:op", "kl_spike"}
    with pytest.raises(ConfigError, match="kl_spike must not be above kl_extreme"):
        AnomalyThresholds(kl_spike=0.9)
    with pytest.raises(ConfigError, match="patience"):
        AnomalyThresholds(patience=0)
    with pytest.raises(ConfigError, match="value_phases"):
        AnomalyThresholds(value_phases=((0.5,),))


def test_a_row_of_update_metrics_is_enough():
    row = {
        "steps": 100,
        "skipped": None,
        "ratio_max": 1.2,
        "ratio_min": 0.8,
        "approx_kl_max": 0.01,
        "explained_variance": 0.4,
        "op_entropy": 0.5,
        "blueprint_entropy": None,
        "ratio_worst_head": "op",
    }

    def look(**changed):
        return AnomalyDetector().check_all(row | changed, current_round=1, total_rounds=2)

    assert not look().has_anomaly
    assert look(approx_kl_max=0.6).anomaly_types == ("kl_extreme",)
    assert look(value_loss=float("inf")).anomaly_types == ("numerical_instability",)
    assert look(skipped="policy_loss is nan").anomaly_types == ("numerical_instability",)
    assert "policy_loss is nan" in look(skipped="policy_loss is nan").details.popitem()[1]
    assert not look(steps=0, skipped="the buffer is empty").has_anomaly


def test_detector_goes_on_where_its_state_stopped():
    one, two = AnomalyDetector(), AnomalyDetector()
    check(one, ratio_max=6.0)
    two.load_state_dict(one.state_dict())
    assert check(two, ratio_max=6.0).new == ("ratio_explosion",)
    assert one.bad_in_a_row["ratio_explosion"] == 1


# --- when telemetry is detailed ------------------------------------------------------------------


def test_an_anomaly_has_the_next_five_rounds_recorded_in_detail():
    escalation, found = Escalation(), []
    for anomaly in (False, True, False, True, *[False] * 6):
        found.append(escalation.detailed)
        escalation.note(anomaly)
    # Before the round in question; the second anomaly counts from its own round.
    assert found == [False, False, *[True] * 7, False]


def row(**changed):
    healthy = {f"{head}_entropy": 0.5 for head in HEAD_NAMES}
    return healthy | {"steps": 10, "skipped": None, "approx_kl_max": 0.01} | changed


def look_twice(metrics):
    detector = AnomalyDetector()
    for _ in range(2):
        report = detector.check_all(metrics, current_round=5, total_rounds=10)
    return report


@pytest.mark.parametrize("head", HEAD_NAMES)
@pytest.mark.parametrize(
    ("entropy", "expected"), [(0.05, "entropy_collapse"), (0.2, "entropy_low"), (0.5, None)]
)
def test_004_h1_entropy_is_watched_for_each_head_and_escalates(head, entropy, expected):
    report = look_twice(row(**{f"{head}_entropy": entropy}))
    assert report.anomaly_types == (() if expected is None else (expected,))
    escalation = Escalation()
    escalation.note(bool(report.new))
    assert escalation.detailed == (expected is not None)


@pytest.mark.parametrize(("kl", "expected"), [(0.2, "kl_spike"), (0.6, "kl_extreme"), (0.05, None)])
def test_004_h2_kl_is_watched(kl, expected):
    found = look_twice(row(approx_kl_max=kl)).anomaly_types
    assert found == (() if expected is None else (expected,))


def test_004_m11_collapse_uses_the_shared_constant_and_a_number_between_zero_and_one():
    assert AnomalyThresholds().entropy_collapse == c.ENTROPY_COLLAPSE_THRESHOLD == 0.1
    assert look_twice(row(op_entropy=0.0999)).anomaly_types == ("entropy_collapse",)
    assert look_twice(row(op_entropy=0.1001)).anomaly_types == ("entropy_low",)


def test_004_m21_ratio_limits_are_settings_of_detector_and_diagnostic():
    strict = AnomalyDetector(AnomalyThresholds(patience=1), ratios=(0.1, 2.0))
    found = strict.check_all(row(ratio_max=3.0), current_round=1, total_rounds=2)
    assert found.anomaly_types == ("ratio_explosion",)
    assert not look_twice(row(ratio_max=3.0)).has_anomaly
    change, ones = torch.full((1, 4), math.log(3.0)), torch.ones(1, 4, dtype=torch.bool)
    arguments = torch.zeros(1, 4), change, ones, torch.zeros(1, 4)
    assert not RatioExplosionDiagnostic.from_batch(*arguments).examples
    assert RatioExplosionDiagnostic.from_batch(*arguments, max_ratio=2.0).examples
