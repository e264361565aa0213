"""The terms of the PPO loss against rlax (golden arrays), TorchRL and exact sums."""

import json
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule as Mod
from torch import nn
from torchrl.objectives import ClipPPOLoss

from agent_support import make_agent
from esper.simic.agent.optimization import (
    clipped_surrogate,
    explained_variance,
    joint_kl,
    k3_kl,
    masked_mean,
    value_errors,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rlax.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["surrogate"], ids=lambda c: f"{len(c['ratios'])}-steps")
def test_clipped_surrogate_equals_rlax_in_value_and_gradient(case):
    ratio = torch.tensor(case["ratios"], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor(case["advantages"], dtype=torch.float64)
    loss = -clipped_surrogate(ratio, advantages, GOLDEN["clip"]).mean()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-12)
    torch.testing.assert_close(
        ratio.grad, torch.tensor(case["gradient"], dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_golden_surrogates_clip_on_both_sides():
    ratios = [r for case in GOLDEN["surrogate"] for r in case["ratios"]]
    assert min(ratios) < 1 - GOLDEN["clip"]
    assert max(ratios) > 1 + GOLDEN["clip"]


def torchrl_loss(logits: nn.Parameter) -> ClipPPOLoss:
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = logits

        def forward(self, observation):
            return self.logits + 0.0 * observation

    actor = ProbabilisticTensorDictSequential(
        Mod(Policy(), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )
    return ClipPPOLoss(actor, None, clip_epsilon=0.2, entropy_bonus=False)


def test_clipped_surrogate_equals_torchrl_in_value_and_gradient():
    gen = torch.Generator().manual_seed(0)
    old = torch.randn(64, 5, generator=gen)
    start = old + 0.5 * torch.randn(64, 5, generator=gen)
    actions = torch.randint(5, (64,), generator=gen)
    advantages = torch.randn(64, generator=gen)
    old_log_probs = old.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)

    theirs = nn.Parameter(start.clone())
    module = torchrl_loss(theirs)
    result = module(
        TensorDict(
            {
                "observation": torch.zeros(64, 5),
                "action": actions,
                "action_log_prob": old_log_probs,
                "advantage": advantages[:, None],
            },
            [64],
        )
    )
    result["loss_objective"].backward()
    their_gradient = next(p.grad for p in module.parameters() if p.grad is not None)

    ours = nn.Parameter(start.clone())
    log_probs = ours.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)
    ratio = (log_probs - old_log_probs).exp()
    loss = -clipped_surrogate(ratio, advantages, 0.2).mean()
    loss.backward()
    torch.testing.assert_close(loss, result["loss_objective"])
    torch.testing.assert_close(ours.grad, their_gradient)
    assert ((ratio - 1).abs() > 0.2).any()


def test_k3_is_the_exact_kl_in_expectation():
    gen = torch.Generator().manual_seed(1)
    old = torch.randn(20, 6, generator=gen, dtype=torch.float64).log_softmax(-1)
    new = torch.randn(20, 6, generator=gen, dtype=torch.float64).log_softmax(-1)
    expected = (old.exp() * k3_kl(new - old)).sum(-1)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=old), torch.distributions.Categorical(logits=new)
    )
    torch.testing.assert_close(expected, exact)
    assert (k3_kl(new - old) >= 0).all()


def test_masked_mean_of_nothing_is_zero():
    mean = masked_mean(torch.ones(3, 2), torch.tensor([[True, False]] * 3))
    assert mean.tolist() == [1.0, 0.0]


def test_value_errors_take_the_worse_of_clipped_and_unclipped():
    values, old, returns = torch.tensor([3.0, 0.4]), torch.zeros(2), torch.tensor([3.0, 1.0])
    # First: unclipped error 0, clipped to .5 it is 2.5²; second: inside the clip, .6² either way.
    assert value_errors(values, returns, old, clip=0.5).tolist() == pytest.approx([6.25, 0.36])
    assert value_errors(values, returns, old).tolist() == pytest.approx([0.0, 0.36])


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.zeros(3), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(3)) == 0.0


def test_losses_refuse_shapes_that_would_broadcast():
    with pytest.raises(ValueError, match="differ in shape"):
        clipped_surrogate(torch.ones(4, 1), torch.ones(4), 0.2)
    with pytest.raises(ValueError, match="differ in shape"):
        value_errors(torch.ones(4, 1), torch.ones(4), torch.ones(4))


def test_000_m1_huber_bounds_the_gradient_of_huge_errors():
    values = torch.tensor([1e6, -1e6, 0.1], requires_grad=True)
    zeros = torch.zeros(3)
    value_errors(values, zeros, zeros, huber_delta=2.0).sum().backward()
    assert values.grad.tolist() == pytest.approx([2.0, -2.0, 0.1])
    squared = torch.tensor([1e3], requires_grad=True)
    value_errors(squared, zeros[:1], zeros[:1]).sum().backward()
    assert squared.grad.item() == pytest.approx(2e3)


def test_001_m2_value_clip_is_independent_of_the_ratio_and_can_be_off():
    values, old, returns = torch.tensor([5.0]), torch.zeros(1), torch.tensor([5.0])
    assert value_errors(values, returns, old, clip=None).item() == 0.0
    assert value_errors(values, returns, old, clip=1.0).item() == 16.0
    assert make_agent().config.value_clip is None
    assert make_agent(value_clip=3.0).config.clip_ratio == make_agent().config.clip_ratio


def test_004_m20_kl_is_the_sum_over_heads_weighted_by_their_share_of_steps():
    log_ratio = torch.tensor([[0.2, 0.0, 0.0, 0.1], [0.0, 0.0, 0.0, -0.3]])
    relevant = torch.tensor([[True, False, False, True], [False, False, False, True]])
    k = k3_kl(log_ratio)
    by_hand = 0.5 * k[0, 0] + 1.0 * (k[0, 3] + k[1, 3]) / 2
    assert joint_kl(log_ratio, relevant).item() == pytest.approx(by_hand.item(), rel=1e-6)
