"""Normalised advantages, and the credit of each head."""

import pytest
import torch

from agent_support import (
    shuffle,
)
from esper.leyline import HEAD_NAMES, RELEVANT_HEADS, LifecycleOp
from esper.simic.agent.advantages import (
    compute_per_head_advantages,
    head_relevance,
    normalize_advantages,
)


def test_000_m2_almost_constant_advantages_stay_small():
    advantages = 3.0 + 1e-6 * torch.randn(2, 10, generator=shuffle())
    normalized = normalize_advantages(advantages, torch.ones(2, 10, dtype=torch.bool))
    assert normalized.isfinite().all()
    assert normalized.abs().max() < 1e-2


@pytest.mark.parametrize("steps", [0, 1])
def test_002_crit1_normalising_none_or_one_step_stays_finite(steps):
    advantages = torch.full((3, 4), 5.0)
    valid = torch.zeros(3, 4, dtype=torch.bool)
    valid.view(-1)[:steps] = True
    normalized = normalize_advantages(advantages, valid)
    assert (normalized == 0).all()


def test_004_m8_advantages_of_the_op_are_the_given_tensor():
    advantages = torch.randn(4, 6, generator=shuffle())
    before = advantages.clone()
    per_head = compute_per_head_advantages(advantages, torch.zeros(4, 6, dtype=torch.long))
    assert per_head["op"] is advantages
    assert torch.equal(advantages, before)


def test_000_a2_advantages_and_losses_use_the_same_causal_table():
    ops = torch.arange(4)
    per_head = compute_per_head_advantages(torch.ones(4), ops)
    relevant = head_relevance(ops)
    for op in LifecycleOp:
        for index, name in enumerate(HEAD_NAMES):
            expected = name in RELEVANT_HEADS[op]
            assert relevant[op, index].item() is expected
            assert bool(per_head[name][op]) is expected


def test_two_steps_are_enough_to_normalize():
    scaled = normalize_advantages(
        torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]])
    )
    expected = torch.tensor([[-(0.5**0.5), 0.5**0.5, 0.0]])
    torch.testing.assert_close(scaled, expected)
