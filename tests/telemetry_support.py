"""A small network with gradients, and their health."""

import torch
from torch import nn

from esper.simic.telemetry.health import GradientHealthMetrics, measure_gradients


def collect_gradients(params, thresholds):
    return GradientHealthMetrics.from_row(measure_gradients(params, thresholds).tolist())


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
