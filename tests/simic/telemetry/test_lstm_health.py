"""Hidden states of the policy: against naive values, in one transfer."""

import math

import pytest
import torch

from esper.simic.telemetry.health import compute_lstm_health


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
    assert found.unhealthy_envs == ()


def test_lstm_health_names_the_environments():
    h, c = hidden()
    h[0, 0, 1] = math.nan
    c[1, 2, 0] = -math.inf
    found = compute_lstm_health((h, c))
    assert found.unhealthy_envs == (0, 2)
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


def test_004_m14_lstm_health_reads_the_device_once(transfers):
    compute_lstm_health(hidden(envs=16))
    assert sum(transfers.values()) == transfers["tolist"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_004_gap3_lstm_health_of_edge_cases(value):
    assert compute_lstm_health(None) is None
    h = torch.ones(1, 2, 3)
    h[0, 1, 2] = value
    found = compute_lstm_health((h, torch.ones(1, 2, 3)))
    assert found.unhealthy_envs == (1,)
    assert found.h_norm == pytest.approx(value, nan_ok=True)
