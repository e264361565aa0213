"""Remedies against noise leave the policy gradient what it is: compared with enumerations."""

from itertools import product

import numpy as np
import pytest
import torch

from agent_support import (
    filled_buffer,
    make_agent,
    shuffle,
)
from esper.leyline import ConfigError
from esper.simic import analytic
from esper.simic.agent.advantages import check_groups, compute_gae, leave_one_out
from esper.simic.agent.rollout import action_draws, play_round

# --- the rest of the group as a baseline ---------------------------------------------------------


def test_a_baseline_is_the_mean_of_the_others_at_the_same_step():
    rng = np.random.default_rng(0)
    groups = np.array([4, 1, 4, 1, 4, 9, 9])
    advantages, lengths = rng.normal(size=(7, 5)), rng.integers(1, 6, size=7)
    valid = np.arange(5) < lengths[:, None]
    found = leave_one_out(
        torch.from_numpy(advantages), torch.from_numpy(groups), torch.from_numpy(valid)
    )
    for row, step in product(range(7), range(5)):
        others = [
            advantages[other, step] if valid[other, step] else 0.0
            for other in range(7)
            if groups[other] == groups[row] and other != row
        ]
        expected = advantages[row, step] - np.mean(others) if valid[row, step] else 0.0
        assert found[row, step].item() == pytest.approx(expected, abs=1e-12)


# A problem of two steps: states 0 (first), 1..4 (second, by luck and action). With bad luck the
# first action can end the episode. `CRITIC` is wrong on purpose.
_RNG = np.random.default_rng(3)
LUCK = (0.3, 0.7)
FIRST, SECOND = _RNG.normal(size=(2, 2)), _RNG.normal(size=(2, 2, 2))
CRITIC = _RNG.normal(size=5)


def episode(luck: int, first: int, second: int):
    """States, actions and rewards; one step if the episode ends early."""
    if luck == 0 and first == 1:
        return (0,), (first,), (FIRST[luck, first],)
    after = 1 + 2 * luck + first
    return (0, after), (first, second), (FIRST[luck, first], SECOND[luck, first, second])


def gradient_of_the_return(logits: torch.Tensor) -> torch.Tensor:
    log_policy, total = torch.log_softmax(logits, dim=-1), torch.zeros((), dtype=torch.float64)
    for luck, first, second in product(range(2), range(2), range(2)):
        states, actions, rewards = episode(luck, first, second)
        # An episode that ended is met once for each second action that was never taken.
        chance = LUCK[luck] * (1.0 if len(states) == 2 else 0.5)
        pairs = zip(states, actions, strict=True)
        probability = torch.stack([log_policy[s, a] for s, a in pairs]).sum().exp()
        total = total + chance * probability * sum(rewards)
    return torch.autograd.grad(total, logits)[0]


def expected_gradient(logits: torch.Tensor, baseline) -> torch.Tensor:
    """Mean of the estimate over all pairs of episodes with common luck."""
    log_policy, total = torch.log_softmax(logits, dim=-1), torch.zeros((), dtype=torch.float64)
    for luck, *choices in product(range(2), *[range(2)] * 4):
        pair = [episode(luck, *choices[:2]), episode(luck, *choices[2:])]
        valid = torch.tensor([[True, len(states) == 2] for states, _, _ in pair])
        rewards, values = torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
        log_probs, chance = [], LUCK[luck]
        for row, (states, actions, paid) in enumerate(pair):
            rewards[row, : len(paid)] = torch.tensor(paid)
            values[row, : len(paid)] = torch.from_numpy(CRITIC[list(states)])
            own = [log_policy[s, a] for s, a in zip(states, actions, strict=True)]
            log_probs.append(torch.stack([*own, torch.zeros(()).double()][:2]))
            chance *= 1.0 if len(states) == 2 else 0.5
        ends = valid & ~torch.cat([valid[:, 1:], torch.zeros(2, 1, dtype=torch.bool)], dim=1)
        zeros, none = torch.zeros(2, 2).double(), torch.zeros(2, 2, dtype=torch.bool)
        advantages, _ = compute_gae(rewards, values, zeros, ends, none, 1.0, 1.0)
        advantages = baseline(advantages, torch.zeros(2, dtype=torch.long), valid)
        scored = torch.stack(log_probs)
        probability = scored.sum().exp().detach()
        total = total + chance * probability * (scored * advantages)[valid].sum() / 2
    return torch.autograd.grad(total, logits)[0]


def test_the_rest_of_the_group_as_a_baseline_leaves_the_gradient_unbiased():
    logits = torch.randn(5, 2, generator=shuffle(1), dtype=torch.float64).requires_grad_()
    exact = gradient_of_the_return(logits)
    assert torch.allclose(expected_gradient(logits, leave_one_out), exact, atol=1e-12)
    assert torch.allclose(expected_gradient(logits, lambda a, g, v: a), exact, atol=1e-12)

    def own_included(advantages, groups, valid):
        return advantages - torch.where(valid, advantages, 0.0).mean(dim=0)

    assert (expected_gradient(logits, own_included) - exact).abs().max() > 1e-2


def test_what_is_common_to_a_group_does_not_reach_the_gradient():
    """Hosts that differ by a lot change advantages not at all, and alone they would."""

    def spread_of(spread: float, group_baseline: bool) -> float:
        sizes = {"observation_dim": analytic.OBSERVATION_DIM, "num_slots": 2, "num_blueprints": 3}
        agent = make_agent(network=sizes, group_baseline=group_baseline, gamma=1.0, gae_lambda=1.0)
        buffer = agent.new_buffer(16, analytic.HORIZON)
        env = analytic.AnalyticGrowth(16, key=2, group=4, spread=spread)
        play_round(agent, env, buffer, 0, action_draws(0, 0, 16, analytic.HORIZON))
        return agent.update(buffer, shuffle()).values["advantage_std"]

    assert spread_of(10.0, True) == pytest.approx(spread_of(0.0, True), rel=1e-4)
    assert spread_of(10.0, False) > 5 * spread_of(0.0, False)


def test_the_critic_learns_returns_whatever_the_baseline_of_the_policy(monkeypatch):
    targets = []
    for group_baseline in (False, True):
        agent = make_agent(group_baseline=group_baseline)
        buffer = filled_buffer(agent)
        buffer.groups[:] = 0
        learn = agent._learn

        def remember(batch, advantages, returns, *rest, learn=learn):
            targets.append(returns)
            return learn(batch, advantages, returns, *rest)

        monkeypatch.setattr(agent, "_learn", remember)
        agent.update(buffer, shuffle())
    assert targets[0].std() > 0.1
    assert torch.equal(*targets)


def test_a_group_of_one_has_nobody_to_be_compared_with():
    agent = make_agent(group_baseline=True)
    with pytest.raises(ConfigError, match="at least 2 environments in every group"):
        agent.update(filled_buffer(agent), shuffle())
    check_groups(torch.tensor([3, 0, 3, 0]))
