"""Health of gradients against a naive count, in few operations and one transfer; and its drift."""

import json
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline import ConfigError
from esper.simic.telemetry.anomaly_detector import AnomalyDetector
from esper.simic.telemetry.health import (
    GradientEMATracker,
    GradientThresholds,
    measure_gradients,
)
from telemetry_support import collect_gradients, with_gradients

THRESHOLDS = GradientThresholds.for_clip_norm(0.5)


class Transfers(TorchDispatchMode):
    """Counts what waits for the device: reads of single values, and copies to the host."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def naive(params):
    grads = [p.grad for p in params if p.grad is not None]
    norms = [float(g.norm()) for g in grads]
    elements = [float(x) for g in grads for x in g.flatten()]
    return {
        "tensors": len(grads),
        "norm": math.sqrt(sum(x * x for x in elements)),
        "vanishing": sum(norm < THRESHOLDS.vanishing for norm in norms),
        "exploding": sum(norm > THRESHOLDS.exploding for norm in norms),
        "zero_fraction": sum(x == 0 for x in elements) / len(elements),
        "not_finite": sum(not math.isfinite(x) for x in elements),
    }


def spoil(net, how):
    grads = [p.grad for p in net.parameters()]
    if how == "zeros":
        grads[0].zero_()
        grads[2][0] = 0.0
    elif how == "small":
        grads[1].mul_(1e-9)
    elif how == "large":
        grads[4].mul_(100.0)
    elif how == "missing":
        list(net.parameters())[3].grad = None
    elif how == "broken":
        grads[0][0, :2] = math.nan
        grads[1][2] = math.inf
        grads[1][3] = -math.inf


@pytest.mark.parametrize("how", ["nothing", "zeros", "small", "large", "missing", "broken"])
def test_collector_counts_what_a_naive_count_finds(how):
    net = with_gradients()
    spoil(net, how)
    found, expected = collect_gradients(net.parameters(), THRESHOLDS), naive(net.parameters())
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, nan_ok=True, rel=1e-5), name
    assert found.is_finite == (how != "broken")


def test_d18_gradient_health_is_real():
    net = with_gradients()
    assert collect_gradients(net.parameters(), THRESHOLDS).health == 1.0
    spoil(net, "large")
    large = collect_gradients(net.parameters(), THRESHOLDS)
    assert large.health == pytest.approx(1.0 - 0.8 / 6)
    spoil(net, "small")
    both = collect_gradients(net.parameters(), THRESHOLDS)
    assert both.health == pytest.approx(1.0 - 0.8 / 6 - 0.5 / 6)
    spoil(net, "broken")
    assert collect_gradients(net.parameters(), THRESHOLDS).health == 0.0


def test_measuring_does_not_wait_for_the_device(transfers):
    measure_gradients(with_gradients().parameters(), THRESHOLDS)
    assert sum(transfers.values()) == 0


def test_collector_needs_as_many_operations_for_many_tensors_as_for_few():
    def operations(n):
        params = [nn.Parameter(torch.ones(3)) for _ in range(n)]
        for parameter in params:
            parameter.grad = torch.ones(3)
        with Transfers() as seen:
            collect_gradients(params, THRESHOLDS)
        # Making the list of norms one tensor, and flattening, copy; that is one operation each.
        return seen.ops

    few, many = operations(3), operations(60)
    arithmetic = {name for name in few if name not in ("view", "detach")}
    assert all(few[name] == many[name] for name in arithmetic)


def test_collector_takes_parameters_of_several_kinds_together():
    """Devices are told apart in the same way as dtypes."""
    params = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, dtype=torch.float64))]
    for parameter in params:
        parameter.grad = torch.full_like(parameter, 2.0)
    params[1].grad[0] = math.nan
    found = collect_gradients(params, THRESHOLDS)
    assert (found.tensors, found.not_finite) == (2, 1)
    params[1].grad[0] = 2.0
    assert collect_gradients(params, THRESHOLDS).norm == pytest.approx(math.sqrt(28))


def test_thresholds_come_from_the_clip_norm():
    assert THRESHOLDS.exploding == 5.0
    assert THRESHOLDS.vanishing == pytest.approx(1e-7)
    assert GradientThresholds.for_clip_norm(2.0).exploding == 20.0
    with pytest.raises(ConfigError, match="above 0"):
        GradientThresholds.for_clip_norm(0.0)


def test_drift_is_measured_before_the_mean_moves():
    tracker = GradientEMATracker()
    first = tracker.update(2.0, 1.0)
    assert set(first.values()) == {None}
    second = tracker.update(3.0, 0.5)
    assert second["norm_drift"] == pytest.approx(0.5)
    assert second["health_drift"] == pytest.approx(0.5)
    assert tracker.norm == pytest.approx(2.01)
    for _ in range(3000):
        last = tracker.update(7.0, 1.0)
    assert last["norm_drift"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("absent", [None, math.nan, math.inf])
def test_what_is_absent_does_not_poison_the_mean(absent):
    tracker = GradientEMATracker()
    tracker.update(2.0, 1.0)
    drift = tracker.update(absent, absent)
    assert set(drift.values()) == {None}
    assert (tracker.norm, tracker.health) == (2.0, 1.0)


def test_tracker_goes_on_where_its_state_stopped():
    one, two = GradientEMATracker(), GradientEMATracker()
    one.update(2.0, 0.8)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.update(5.0, 0.1) == two.update(5.0, 0.1)


def test_004_c6_counting_needs_no_loop_over_tensors_and_equals_a_naive_count(transfers):
    """One transfer, however many tensors there are; the counts are those of a loop."""
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(40)]
    for parameter in params:
        parameter.grad = torch.full((3, 3), 0.1)
    grads = [p.grad for p in params]
    grads[3].view(-1)[:2] = math.nan
    grads[5].view(-1)[0] = math.inf
    grads[7].zero_()
    found = collect_gradients(params, THRESHOLDS)
    assert sum(transfers.values()) == transfers["tolist"] == 1
    elements = [x for grad in grads for x in grad.flatten().tolist()]
    assert found.not_finite == sum(not math.isfinite(x) for x in elements) == 3
    assert found.zero_fraction == pytest.approx(sum(x == 0 for x in elements) / len(elements))


def test_004_h14_thresholds_follow_the_clip_norm_in_use():
    net = with_gradients()
    net[0].weight.grad.fill_(2.0)  # norm 11.8
    for clip, exploding in ((0.5, 1), (2.0, 0)):
        thresholds = GradientThresholds.for_clip_norm(clip)
        assert thresholds.exploding == 10 * clip
        assert collect_gradients(net.parameters(), thresholds).exploding == exploding


def test_004_gap2_ema_drift_is_detected():
    tracker, detector = GradientEMATracker(), AnomalyDetector()
    for norm in [1.0] * 20 + [2.0] * 2:
        drift = tracker.update(norm, 1.0)
        report = detector.check_all(drift, current_round=1, total_rounds=2)
    assert report.anomaly_types == ("gradient_norm_drift",)
