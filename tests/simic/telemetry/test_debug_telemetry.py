"""Every layer, and every place that is not finite: against naive values, in one transfer."""

import math

import pytest

from esper.simic.telemetry.debug_telemetry import (
    check_numerical_stability,
    collect_per_layer_gradients,
    summarize_layers,
)
from telemetry_support import network, with_gradients


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
    assert found == {
        "dead_layers": 1,
        "exploding_layers": 1,
        "nan_grad_count": 3,
        "layer_gradient_health": pytest.approx(1 - 0.5 / 6 - 0.8 / 6 - 0.03),
    }


def test_layers_transfer_once(transfers):
    collect_per_layer_gradients(with_gradients())
    assert sum(transfers.values()) == transfers["tolist"] == 1


def test_stability_report_names_what_is_broken():
    net = with_gradients()
    fine = check_numerical_stability(net, pre_clip_grad_norm=4.0)
    largest = max(float(p.grad.abs().max()) for p in net.parameters())
    assert fine.max_gradient == pytest.approx(largest)
    assert fine.flat() == {
        "nan_in_weights": None,
        "inf_in_weights": None,
        "nan_in_gradients": None,
        "inf_in_gradients": None,
        "max_weight": fine.max_weight,
        "max_gradient": fine.max_gradient,
        "pre_clip_grad_norm": 4.0,
    }
    net[0].bias.data[0] = math.nan
    net[2].weight.grad[0, 0] = math.inf
    net[4].bias.grad[0] = -math.inf
    found = check_numerical_stability(net)
    assert (found.nan_in_weights, found.inf_in_weights) == (("0.bias",), ())
    assert found.inf_in_gradients == ("2.weight", "4.bias")
    assert found.flat()["inf_in_gradients"] == "2.weight, 4.bias"
    assert found.pre_clip_grad_norm is None


def test_stability_report_without_gradients_has_none():
    assert check_numerical_stability(network()).max_gradient is None


def test_d15_layer_health_is_measured_and_a_missing_one_is_left_out():
    net = with_gradients()
    assert summarize_layers(collect_per_layer_gradients(net))["layer_gradient_health"] == 1.0
    net[0].weight.grad.zero_()
    found = summarize_layers(collect_per_layer_gradients(net))
    assert found["layer_gradient_health"] == pytest.approx(1 - 0.5 / 6)
    assert summarize_layers(collect_per_layer_gradients(network())) == {}
