"""Gradients, hidden states, layers, profiles: against naive counts, in one transfer."""

import json
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline import ConfigError
from esper.simic.telemetry import (
    DeviceTimer,
    GradientEMATracker,
    GradientThresholds,
    check_numerical_stability,
    collect_gradients,
    collect_per_layer_gradients,
    compute_lstm_health,
    start_collecting,
    summarize_layers,
    training_profiler,
)

THRESHOLDS = GradientThresholds.for_clip_norm(0.5)


class Transfers(TorchDispatchMode):
    """Counts what waits for the device: reads of single values, and copies to the host."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def transfers(monkeypatch):
    """How often tensors are read out: item, tolist, cpu, numpy and conversions to Python."""
    count = Counter()
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, _name=name, _original=original, **kwargs):
            count[_name] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    return count


def network(key=0):
    with torch.random.fork_rng():
        torch.manual_seed(key)
        return nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)
        )


def with_gradients(key=0):
    net = network(key)
    draw = torch.Generator().manual_seed(key)
    for parameter in net.parameters():
        parameter.grad = 0.3 * torch.randn(parameter.shape, generator=draw)
    return net


def naive(params):
    grads = [p.grad for p in params if p.grad is not None]
    norms = [float(g.norm()) for g in grads]
    elements = [float(x) for g in grads for x in g.flatten()]
    return {
        "tensors": len(grads),
        "norm": math.sqrt(sum(x * x for x in elements)),
        "min_layer_norm": min(norms),
        "max_layer_norm": max(norms),
        "vanishing": sum(norm < THRESHOLDS.vanishing for norm in norms),
        "exploding": sum(norm > THRESHOLDS.exploding for norm in norms),
        "zero_fraction": sum(x == 0 for x in elements) / len(elements),
        "nan_count": sum(math.isnan(x) for x in elements),
        "inf_count": sum(math.isinf(x) for x in elements),
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
    assert found.has_vanishing == (expected["vanishing"] > 0)
    assert found.is_finite == (how != "broken")


def test_health_of_gradients():
    net = with_gradients()
    healthy = collect_gradients(net.parameters(), THRESHOLDS)
    assert healthy.is_healthy
    spoil(net, "large")
    large = collect_gradients(net.parameters(), THRESHOLDS)
    assert large.has_exploding
    assert not large.is_healthy
    assert large.health == pytest.approx(1.0 - 0.8 / 6)
    spoil(net, "small")
    both = collect_gradients(net.parameters(), THRESHOLDS)
    assert both.health == pytest.approx(1.0 - 0.8 / 6 - 0.5 / 6)
    assert both.norm_ratio > 1000
    spoil(net, "broken")
    broken = collect_gradients(net.parameters(), THRESHOLDS)
    assert (broken.health, broken.is_healthy) == (0.0, False)


def test_mostly_zero_gradients_are_not_healthy():
    net = with_gradients()
    for parameter in net.parameters():
        parameter.grad.flatten()[1:] = 0.0
    assert not collect_gradients(net.parameters(), THRESHOLDS).is_healthy


def test_no_gradients_is_none_and_not_healthy():
    assert collect_gradients(network().parameters(), THRESHOLDS) is None
    assert start_collecting([], THRESHOLDS) is None


def test_collector_transfers_once(transfers):
    net = with_gradients()
    collect_gradients(net.parameters(), THRESHOLDS)
    assert sum(transfers.values()) == transfers["tolist"] == 1


def test_collector_waits_for_the_device_only_when_asked(transfers):
    pending = start_collecting(with_gradients().parameters(), THRESHOLDS)
    assert sum(transfers.values()) == 0
    assert pending.result() == collect_gradients(with_gradients().parameters(), THRESHOLDS)


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
    """One row per device and dtype; devices are told apart in the same way as dtypes."""
    params = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, dtype=torch.float64))]
    for parameter in params:
        parameter.grad = torch.full_like(parameter, 2.0)
    params[1].grad[0] = math.nan
    pending = start_collecting(params, THRESHOLDS)
    assert len(pending.rows) == 2
    found = pending.result()
    assert (found.tensors, found.nan_count) == (2, 1)
    params[1].grad[0] = 2.0
    assert collect_gradients(params, THRESHOLDS).norm == pytest.approx(math.sqrt(28))


def test_collector_is_left_out_of_compilation():
    """Inside a compiled function it runs as it is: what surrounds it is compiled, it is not."""
    params, graphs = list(with_gradients().parameters()), []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op != "output"})
        return graph.forward

    def step(x):
        doubled = x * 2
        health = collect_gradients(params, THRESHOLDS)
        return doubled + 1, health

    torch._dynamo.reset()
    result, health = torch.compile(step, backend=backend)(torch.ones(2))
    torch._dynamo.reset()
    assert result.tolist() == [3.0, 3.0]
    assert health == collect_gradients(params, THRESHOLDS)
    assert len(graphs) == 2
    assert not any("isnan" in name or "norm" in name for graph in graphs for name in graph)


def test_thresholds_come_from_the_clip_norm():
    assert THRESHOLDS.exploding == 5.0
    assert THRESHOLDS.vanishing == pytest.approx(1e-7)
    assert GradientThresholds.for_clip_norm(2.0).exploding == 20.0
    with pytest.raises(ConfigError, match="above 0"):
        GradientThresholds.for_clip_norm(0.0)


# --- drift ---------------------------------------------------------------------------------------


def test_drift_is_measured_before_the_mean_moves():
    tracker = GradientEMATracker(momentum=0.9)
    first = tracker.update(2.0, 1.0)
    assert (first.norm, first.health) == (None, None)
    second = tracker.update(3.0, 0.5)
    assert second.norm == pytest.approx(0.5)
    assert second.health == pytest.approx(0.5)
    assert tracker.norm == pytest.approx(2.1)
    for _ in range(300):
        last = tracker.update(7.0, 1.0)
    assert last.norm == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("absent", [None, math.nan, math.inf])
def test_what_is_absent_does_not_poison_the_mean(absent):
    tracker = GradientEMATracker()
    tracker.update(2.0, 1.0)
    drift = tracker.update(absent, absent)
    assert (drift.norm, drift.health) == (None, None)
    assert (tracker.norm, tracker.health) == (2.0, 1.0)


def test_tracker_goes_on_where_its_state_stopped():
    one, two = GradientEMATracker(), GradientEMATracker()
    one.update(2.0, 0.8)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.update(5.0, 0.1) == two.update(5.0, 0.1)
    with pytest.raises(ValueError, match="momentum"):
        GradientEMATracker(momentum=1.0)


# --- hidden states -------------------------------------------------------------------------------


def hidden(layers=2, envs=3, size=4):
    draw = torch.Generator().manual_seed(0)
    shape = (layers, envs, size)
    return torch.rand(shape, generator=draw), torch.rand(shape, generator=draw) - 2.0


def test_lstm_health_matches_naive_values():
    h, c = hidden()
    found = compute_lstm_health((h, c))
    assert found.h_norm == pytest.approx(max(float(h[:, e].norm()) for e in range(3)))
    assert found.c_norm == pytest.approx(max(float(c[:, e].norm()) for e in range(3)))
    assert found.h_max == pytest.approx(float(h.abs().max()))
    assert found.c_max == pytest.approx(float(c.abs().max()))
    assert found.is_healthy
    assert not found.has_nan
    assert not found.has_inf


def test_lstm_health_names_the_environments():
    h, c = hidden()
    h[0, 0, 1] = math.nan
    c[1, 2, 0] = -math.inf
    found = compute_lstm_health((h, c))
    assert (found.has_nan, found.has_inf, found.unhealthy_envs) == (True, True, (0, 2))
    assert math.isnan(found.h_norm)
    assert found.c_norm == math.inf


@pytest.mark.parametrize("factor", [0.0, 1e-8, 1e3])
def test_saturated_or_extinct_states_are_unhealthy(factor):
    h, c = hidden()
    c[:, 1] *= factor
    assert compute_lstm_health((h, c)).unhealthy_envs == (1,)


def test_lstm_health_of_nothing_is_none():
    assert compute_lstm_health(None) is None
    with pytest.raises(ValueError, match="layers, envs, size"):
        compute_lstm_health((torch.ones(3, 4), torch.ones(3, 4)))


def test_lstm_health_transfers_once(transfers):
    compute_lstm_health(hidden(envs=16))
    assert sum(transfers.values()) == transfers["tolist"] == 1


# --- every layer ---------------------------------------------------------------------------------


def test_layers_match_naive_values():
    net = with_gradients()
    grad = net[2].weight.grad
    grad[0] = 0.0
    grad[1, 0] = 50.0
    grad[1, 1] = 1e-7
    layers = {layer.layer_name: layer for layer in collect_per_layer_gradients(net)}
    assert len(layers) == 6
    found = layers["2.weight"]
    assert found.param_count == grad.numel() == 42
    assert found.grad_norm == pytest.approx(float(grad.norm()))
    assert found.grad_mean == pytest.approx(float(grad.mean()))
    assert found.grad_std == pytest.approx(float(grad.std(correction=0)))
    assert (found.grad_min, found.grad_max) == pytest.approx((float(grad.min()), 50.0))
    assert found.zero_fraction == pytest.approx(7 / 42)
    assert found.small_fraction == pytest.approx(8 / 42)
    assert found.large_fraction == pytest.approx(1 / 42)
    assert (found.nan_count, found.inf_count) == (0, 0)


def test_layers_are_summed_up():
    net = with_gradients()
    net[0].weight.grad.zero_()
    net[2].weight.grad.fill_(20.0)
    net[4].bias.grad.fill_(math.nan)
    found = summarize_layers(collect_per_layer_gradients(net))
    assert (found.dead_layers, found.exploding_layers, found.nan_grad_count) == (1, 1, 3)
    assert found.layer_gradient_health == pytest.approx(1 - 0.5 / 6 - 0.8 / 6 - 0.03)
    assert summarize_layers(collect_per_layer_gradients(network())) is None


def test_layers_transfer_once(transfers):
    collect_per_layer_gradients(with_gradients())
    assert sum(transfers.values()) == transfers["tolist"] == 1


def test_stability_report_names_what_is_broken():
    net = with_gradients()
    fine = check_numerical_stability(net, loss=0.3, pre_clip_grad_norm=4.0)
    assert not fine.has_issues()
    assert fine.pre_clip_grad_norm == 4.0
    assert fine.max_gradient == pytest.approx(
        max(float(p.grad.abs().max()) for p in net.parameters())
    )
    net[0].bias.data[0] = math.nan
    net[2].weight.grad[0, 0] = math.inf
    found = check_numerical_stability(net)
    assert (found.nan_in_weights, found.inf_in_gradients) == (("0.bias",), ("2.weight",))
    assert found.has_issues()
    assert found.loss_is_finite is found.pre_clip_grad_norm is None


@pytest.mark.parametrize("broken", [{"loss": math.nan}, {"pre_clip_grad_norm": math.inf}])
def test_stability_report_looks_at_loss_and_norm(broken):
    assert check_numerical_stability(with_gradients(), **broken).has_issues()


def test_stability_report_without_gradients_has_none():
    found = check_numerical_stability(network())
    assert found.max_gradient is None
    assert not found.has_issues()


# --- time ----------------------------------------------------------------------------------------


def test_profile_lands_inside_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with training_profiler(tmp_path / "run", wait=0, warmup=1, active=1) as profiler:
        for _ in range(3):
            torch.ones(8) @ torch.ones(8)
            profiler.step()
    traces = list((tmp_path / "run" / "profile").glob("*.json"))
    assert len(traces) == 1
    assert "traceEvents" in json.loads(traces[0].read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_profiler_that_is_off_does_nothing(tmp_path):
    with training_profiler(tmp_path / "run", enabled=False) as profiler:
        assert profiler is None
    assert not (tmp_path / "run").exists()


def test_timer_reads_the_clock_after_the_device(monkeypatch):
    order = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: order.append("wait"))
    clock = iter([1.0, 1.25])

    def now():
        order.append("clock")
        return next(clock)

    monkeypatch.setattr("esper.simic.telemetry.profiler.time.perf_counter", now)
    with DeviceTimer("cuda") as timer:
        pass
    assert order == ["wait", "clock", "wait", "clock"]
    assert timer.milliseconds == 250.0
    assert DeviceTimer().milliseconds is None
