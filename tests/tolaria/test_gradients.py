import math

import numpy as np
import pytest
import torch

from esper.leyline import SeedStage
from esper.tolaria.engine.gradients import STRIDE, GradientMeter
from helpers import loss_of, plant, wrap


def flat_norm(params: list[torch.nn.Parameter]) -> float:
    return float(torch.cat([p.grad.flatten() for p in params if p.grad is not None]).norm())


def test_readings_are_those_of_all_gradients_laid_end_to_end() -> None:
    network, x = wrap("cnn")
    plant(network, 1, "conv_heavy", SeedStage.BLENDING, 0.4, shake=0.3)
    loss_of(network(x)).backward()
    meter = GradientMeter(network)
    meter.observe()
    found = meter.result()
    host, seed = network.host_parameters(), network.seed_parameters(1)
    sizes = [sum(p.numel() for p in params) for params in (host, seed)]
    ratio = flat_norm(seed) / flat_norm(host) * math.sqrt(sizes[0] / sizes[1])
    assert found["gradient_norm"][1] == pytest.approx(flat_norm(seed), rel=1e-5)
    assert found["gradient_ratio"][1] == pytest.approx(ratio, rel=1e-5)
    assert found["gradient_health"][1] == 1.0
    assert np.isnan(found["gradient_norm"][[0, 2]]).all()


@pytest.mark.parametrize("gradient", [None, 0.0, math.nan, math.inf])
def test_a_tensor_without_a_good_gradient_counts_against_the_health(gradient: float | None) -> None:
    network, x = wrap("cnn")
    plant(network, 0, "conv_heavy", SeedStage.BLENDING, 0.4, shake=0.3)
    loss_of(network(x)).backward()
    params = network.seed_parameters(0)
    params[0].grad = None if gradient is None else torch.full_like(params[0], gradient)
    meter = GradientMeter(network)
    meter.observe()
    assert meter.result()["gradient_health"][0] == pytest.approx(1.0 - 1 / len(params))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_weight_makes_a_seed_unhealthy(value: float) -> None:
    network, _ = wrap("cnn")
    plant(network, 2, "conv_heavy", SeedStage.TRAINING, 0.0)
    assert GradientMeter(network).result()["healthy"].all()
    with torch.no_grad():
        network.seed_parameters(2)[-1].view(-1)[3] = value
    assert GradientMeter(network).result()["healthy"].tolist() == [True, True, False]


def test_every_stride_th_batch_is_measured_from_the_first() -> None:
    network, x = wrap("mlp")
    plant(network, 0, "mlp_small", SeedStage.BLENDING, 0.4)
    loss_of(network(x)).backward()
    meter = GradientMeter(network)
    for _ in range(STRIDE + 1):
        meter.observe()
    assert len(meter.readings) == 2
