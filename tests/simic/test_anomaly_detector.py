"""Each detector fires on its failure and is silent while learning is healthy."""

import os

import numpy as np
import pytest

from esper.leyline import HEAD_NAMES, ConfigError
from esper.leyline.events import ANOMALIES
from esper.simic.telemetry import (
    AnomalyDetector,
    AnomalyThresholds,
    Escalation,
    GradientEMATracker,
    TelemetryConfig,
    TelemetryLevel,
    resident_mb,
)
from esper.simic.telemetry.anomaly_detector import check_entropy, check_kl, value_threshold

HEALTHY = {
    "ratio_max": 1.4,
    "ratio_min": 0.7,
    "explained_variance": 0.5,
    "entropy": dict.fromkeys(HEAD_NAMES, 0.6),
    "kl": 0.01,
    "numbers": {"policy_loss": -0.01, "value_loss": 0.3, "unknown": None},
    "norm_drift": 0.1,
    "health_drift": 0.0,
    "unhealthy_envs": 0,
}
FAILURES = {
    "ratio_explosion": {"ratio_max": 6.0},
    "ratio_collapse": {"ratio_min": 0.05},
    "value_collapse": {"explained_variance": -0.3},
    "numerical_instability": {"numbers": {"policy_loss": float("nan")}},
    "entropy_collapse": {"entropy": {"op": 0.05}},
    "entropy_low": {"entropy": {"blueprint": 0.2}},
    "kl_extreme": {"kl": 0.6},
    "kl_spike": {"kl": 0.2},
    "gradient_norm_drift": {"norm_drift": 0.8},
    "gradient_health_drift": {"health_drift": 0.8},
    "lstm_unhealthy": {"unhealthy_envs": 2},
}
AT_ONCE = ("numerical_instability", "kl_extreme")


def check(detector, current=50, **changed):
    return detector.check_all(current_round=current, total_rounds=100, **(HEALTHY | changed))


def test_every_anomaly_has_a_failure_here():
    assert set(FAILURES) == set(ANOMALIES)


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
    # It is told once, while it lasts.
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
                "entropy": {"op": entropy, "slot": entropy, "blueprint": None, "blend": entropy},
                "kl": 0.012 * abs(noise[4]) * outlier,
                "numbers": {"policy_loss": noise[5], "value_loss": abs(noise[6])},
            },
            float(0.4 * np.exp(0.15 * noise[7])),
        )


@pytest.mark.parametrize("key", range(5))
def test_two_hundred_healthy_updates_are_silent(key):
    detector, tracker = AnomalyDetector(), GradientEMATracker()
    for i, metrics, norm in healthy_updates(key):
        drift = tracker.update(norm, 1.0)
        report = detector.check_all(
            current_round=i,
            total_rounds=200,
            norm_drift=drift.norm,
            health_drift=drift.health,
            **metrics,
        )
        assert not report.has_anomaly, report.details


def test_what_was_not_measured_is_neither_good_nor_bad():
    detector = AnomalyDetector()
    report = detector.check_all(current_round=1, total_rounds=10)
    assert not report.has_anomaly
    assert detector.bad_in_a_row == {}
    for kl in (0.2, None, 0.2):
        report = detector.check_all(current_round=1, total_rounds=10, kl=kl)
    assert report.anomaly_types == ("kl_spike",)


def test_every_head_has_an_anomaly_of_its_own():
    detector = AnomalyDetector()
    for _ in range(2):
        report = check(detector, entropy={"op": 0.05, "slot": 0.2, "blend": 0.5})
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
        AnomalyDetector().check_all(current_round=current, total_rounds=total)


def test_thresholds_are_settings():
    strict = AnomalyThresholds(ratio_max=1.2, patience=1)
    assert check(AnomalyDetector(strict)).anomaly_types == ("ratio_explosion",)
    assert check_entropy({"op": 0.35}, AnomalyThresholds(entropy_low=0.4))["entropy_low:op"]
    assert check_kl(0.05, AnomalyThresholds(kl_spike=0.04))["kl_spike"]
    with pytest.raises(ConfigError, match="kl_spike must not be above kl_extreme"):
        AnomalyThresholds(kl_spike=0.9)
    with pytest.raises(ConfigError, match="patience"):
        AnomalyThresholds(patience=0)


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
        return AnomalyDetector().check_update(row | changed, current_round=1, total_rounds=2)

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


# --- escalation, memory --------------------------------------------------------------------------


def test_an_anomaly_raises_the_level_for_some_rounds():
    escalation = Escalation(TelemetryConfig(escalation_rounds=3))
    levels = []
    for anomaly in (False, True, False, False, False, False):
        escalation.note(anomaly)
        levels.append(escalation.level)
    debug, normal = TelemetryLevel.DEBUG, TelemetryLevel.NORMAL
    assert levels == [normal, debug, debug, debug, normal, normal]


def test_escalation_respects_those_who_want_none():
    for config in (TelemetryConfig(auto_escalate=False), TelemetryConfig(TelemetryLevel.OFF)):
        escalation = Escalation(config)
        escalation.note(True)
        assert escalation.level == config.level
        assert not escalation.wants(TelemetryLevel.DEBUG)
    with pytest.raises(ConfigError, match="escalation_rounds"):
        TelemetryConfig(escalation_rounds=0)


def test_escalation_survives_a_restart():
    one, two = Escalation(), Escalation()
    one.note(True)
    two.load_state_dict(one.state_dict())
    assert two.wants(TelemetryLevel.DEBUG)


def test_memory_of_this_process_is_told_where_the_system_tells_it(tmp_path):
    (tmp_path / "statm").write_text("900 250 30 1 0 60 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert resident_mb(tmp_path / "statm") == 250 * page / 1e6
    assert resident_mb(tmp_path / "nothing") is None
