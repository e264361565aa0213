"""Which head made ratios explode, and which decisions of it."""

import inspect
import math

import pytest
import torch

from esper.leyline import HEAD_NAMES
from esper.simic.telemetry.debug_telemetry import RatioExplosionDiagnostic


def ratios(change, relevant):
    old = torch.full_like(change, -1.0)
    actions = torch.arange(change.numel()).reshape(change.shape)
    return RatioExplosionDiagnostic.from_batch(old, old + change, relevant, actions)


def test_ratio_diagnostic_names_the_worst_head_and_its_decisions():
    change = torch.zeros(5, 4)
    change[1, 0] = math.log(6.0)  # slot
    change[3, 1] = math.log(0.01)  # blueprint: further from 1 than 6 is
    change[4, 2] = math.log(50.0)  # blend, but its step did not use it
    change[2, 3] = math.log(2.0)  # op, within limits
    relevant = torch.ones(5, 4, dtype=torch.bool)
    relevant[4, 2] = False
    found = ratios(change, relevant)
    assert found.worst_head == "blueprint"
    assert found.worst_ratio == pytest.approx(0.01)
    assert found.outliers == {"slot": 1, "blueprint": 1, "blend": 0, "op": 0}
    assert found.log_prob_change_max == pytest.approx(-math.log(0.01))
    summary = {
        "worst_head": "blueprint",
        "worst_ratio": found.worst_ratio,
        "slot_outliers": 1,
        "blueprint_outliers": 1,
        "blend_outliers": 0,
        "op_outliers": 0,
        "log_prob_change_mean": found.log_prob_change_mean,
        "log_prob_change_max": found.log_prob_change_max,
    }
    assert found.flat() == summary
    assert found.examples == [
        {"index": 3, "head": "blueprint", "ratio": pytest.approx(0.01), "action": 13},
        {"index": 1, "head": "slot", "ratio": pytest.approx(6.0), "action": 4},
    ]


def test_ratio_diagnostic_without_outliers_still_names_the_furthest():
    found = ratios(torch.full((3, 4), 0.01), torch.ones(3, 4, dtype=torch.bool))
    assert found.worst_head in HEAD_NAMES
    assert found.examples == []
    assert sum(found.outliers.values()) == 0


@pytest.mark.parametrize("n", [0, 3])
def test_ratio_diagnostic_of_nothing_has_no_worst_head(n):
    found = ratios(torch.zeros(n, 4), torch.zeros(n, 4, dtype=torch.bool))
    assert found.worst_head is found.worst_ratio is found.log_prob_change_mean is None
    assert found.outliers == dict.fromkeys(HEAD_NAMES, 0)


def test_a_ratio_that_is_nan_is_the_worst():
    change = torch.zeros(2, 4)
    change[0, 0], change[1, 3] = 9.0, math.nan
    found = ratios(change, torch.ones(2, 4, dtype=torch.bool))
    assert found.worst_head == "op"
    assert found.examples[0]["head"] == "op"


def test_limits_of_ratios_are_settings_and_shapes_are_checked():
    ones = torch.ones(2, 4, dtype=torch.bool)
    change = torch.full((2, 4), math.log(2.0))
    arguments = torch.zeros(2, 4), change, ones, torch.zeros(2, 4)
    assert not RatioExplosionDiagnostic.from_batch(*arguments).examples
    strict = RatioExplosionDiagnostic.from_batch(*arguments, max_ratio=1.5)
    assert len(strict.examples) == 8
    with pytest.raises(ValueError, match="one shape"):
        RatioExplosionDiagnostic.from_batch(change, change[:1], ones, ones)


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


def test_002_low4_the_ratio_diagnostic_uses_every_argument():
    """Each one, changed alone, changes what is found."""
    base = {
        "old_log_probs": torch.zeros(2, 4),
        "new_log_probs": torch.tensor([3.0, 1.0, 1.0, 0.5]).log().repeat(2, 1),
        "relevant": torch.ones(2, 4, dtype=torch.bool),
        "actions": torch.zeros(2, 4),
        "max_ratio": 2.0,
        "min_ratio": 0.1,
    }
    changed = {
        "old_log_probs": torch.full((2, 4), -1.0),
        "new_log_probs": torch.full((2, 4), -3.0),
        "relevant": torch.eye(4, dtype=torch.bool)[:2],
        "actions": torch.ones(2, 4),
        "max_ratio": 4.0,
        "min_ratio": 0.9,
    }
    assert set(base) == set(inspect.signature(RatioExplosionDiagnostic.from_batch).parameters)
    found = RatioExplosionDiagnostic.from_batch(**base)
    for name, value in changed.items():
        assert RatioExplosionDiagnostic.from_batch(**base | {name: value}) != found, name
