"""MaskedCategorical against sb3-contrib's and TorchRL's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sb3_contrib.common.maskable.distributions import MaskableCategorical
from torchrl.modules import MaskedCategorical as TorchRLMaskedCategorical

from esper.leyline import InvalidStateMachineError
from esper.tamiyo.policy.masked_categorical import MaskedCategorical

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def random_case(key: int, rows: int = 50, n: int = 7, dtype=torch.float32):
    gen = torch.Generator().manual_seed(key)
    logits = (2 * torch.randn(rows, n, generator=gen)).to(dtype)
    mask = torch.rand(rows, n, generator=gen) < 0.5
    mask[torch.arange(rows), torch.randint(n, (rows,), generator=gen)] = True
    return logits, mask


@pytest.mark.parametrize("key", range(3))
def test_log_prob_entropy_and_support_equal_sb3_and_torchrl(key):
    logits, mask = random_case(key)
    ours = MaskedCategorical(logits, mask)
    sb3 = MaskableCategorical(logits=logits, masks=mask)
    torchrl = TorchRLMaskedCategorical(logits=logits, mask=mask)
    legal = mask.sum(-1)
    for action in range(logits.shape[-1]):
        chosen = torch.full((len(logits),), action)
        where = mask[:, action]
        log_probs = ours.log_prob(chosen)[where]
        torch.testing.assert_close(log_probs, sb3.log_prob(chosen)[where])
        torch.testing.assert_close(log_probs, torchrl.log_prob(chosen)[where])
        assert (ours.log_prob(chosen)[~where] < -9000).all()
    nats = ours.entropy() * legal.clamp(min=2).log()
    torch.testing.assert_close(nats, sb3.entropy(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.probs > 0, mask)
    torch.testing.assert_close(sb3.probs > 0, mask)
    torch.testing.assert_close(ours.mode(), torchrl.mode)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_precision_keeps_the_support_and_stays_finite(dtype):
    logits, mask = random_case(1, dtype=dtype)
    ours = MaskedCategorical(logits, mask)
    single = MaskedCategorical(logits.float(), mask)
    assert ours.logits.dtype == dtype
    assert (ours.probs[~mask] == 0).all()
    assert ours.entropy().isfinite().all()
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 3e-2}
    torch.testing.assert_close(ours.probs.float(), single.probs, **tolerance)
    torch.testing.assert_close(ours.entropy().float(), single.entropy(), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_illegal_logits_get_exactly_no_gradient(dtype):
    logits, mask = random_case(2, dtype=dtype)
    logits.requires_grad_()
    ours = MaskedCategorical(logits, mask)
    (ours.log_prob(ours.mode()).sum() + ours.entropy().sum()).backward()
    assert (logits.grad[~mask] == 0).all()
    several = mask & (mask.sum(-1, keepdim=True) > 1)
    assert (logits.grad[several] != 0).any()


def test_gradient_of_log_prob_equals_sb3():
    logits, mask = random_case(3)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    actions = MaskedCategorical(logits, mask).mode()
    MaskedCategorical(ours, mask).log_prob(actions).sum().backward()
    MaskableCategorical(logits=theirs, masks=mask).log_prob(actions).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_row_without_a_legal_action_raises():
    logits, mask = random_case(4)
    mask[7] = False
    with pytest.raises(InvalidStateMachineError, match="1 of 50 rows"):
        MaskedCategorical(logits, mask)


def test_legal_logits_far_below_the_fill_still_win():
    logits, mask = torch.tensor([[-5e4, -5e4 + 1, 0.0]]), torch.tensor([[True, True, False]])
    ours = MaskedCategorical(logits, mask)
    expected = torch.tensor([[0.0, 1.0]]).softmax(-1)
    torch.testing.assert_close(ours.probs[:, :2], expected)
    assert ours.probs[0, 2] == 0


def test_icdf_of_uniform_numbers_has_the_right_frequencies():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0]).expand(40_000, 4)
    mask = torch.tensor([True, False, True, True]).expand(40_000, 4)
    ours = MaskedCategorical(logits, mask)
    uniforms = (torch.arange(40_000, dtype=torch.float64) + 0.5) / 40_000
    counts = np.bincount(ours.icdf(uniforms).numpy(), minlength=4) / 40_000
    np.testing.assert_allclose(counts, ours.probs[0].numpy(), atol=1e-4)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.floats(-50, 50), st.booleans()), min_size=1, max_size=9),
    st.sampled_from([0.0, 0.5, math.nextafter(1.0, 0.0)]),
)
def test_draws_are_legal_even_at_the_edges(row, uniform):
    logits = torch.tensor([[value for value, _ in row]])
    mask = torch.tensor([[legal for _, legal in row]])
    mask[0, 0] |= not mask.any()
    ours = MaskedCategorical(logits, mask)
    assert mask[0, ours.icdf(torch.tensor([uniform], dtype=torch.float64)).item()]
    assert mask[0, ours.sample(torch.Generator().manual_seed(0)).item()]


def test_000_m5_validation_can_be_switched_off_and_then_waits_for_nothing(monkeypatch):
    logits, mask = torch.zeros(2, 3), torch.tensor([[True] * 3, [False] * 3])
    with pytest.raises(RuntimeError, match="no legal action"):
        MaskedCategorical(logits, mask)
    with pytest.raises(ValueError, match="1 NaN"):
        MaskedCategorical(torch.tensor([[torch.nan, 0.0]]), torch.ones(1, 2, dtype=torch.bool))

    def synchronised(self):
        raise AssertionError("read a tensor back")

    for name in ("__bool__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, synchronised)
    MaskedCategorical(logits, mask, validate=False)


def test_000_l5_entropy_of_one_legal_action_is_exactly_zero_with_zero_gradient():
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = torch.tensor([[True, False, False, False]] * 3)
    entropy = MaskedCategorical(logits, mask).entropy()
    entropy.sum().backward()
    assert entropy.tolist() == [0.0] * 3
    assert (logits.grad == 0).all()
