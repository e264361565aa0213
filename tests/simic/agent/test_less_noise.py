"""Remedies against noise leave the policy gradient what it is: compared with enumerations."""

from itertools import product

import numpy as np
import pytest
import torch

from agent_support import (
    BOTH_KINDS,
    OBS,
    RandomGrowth,
    filled_buffer,
    make_agent,
    parameters_of,
    shuffle,
    width_of,
)
from esper.leyline import HEAD_NAMES, NUM_OPS, OP, ConfigError, LifecycleOp
from esper.simic import analytic
from esper.simic.agent import (
    MaskTensors,
    action_draws,
    check_groups,
    compute_gae,
    head_relevance,
    leave_one_out,
    play_round,
)
from esper.simic.agent.types import SequenceBatch

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


def test_a_group_of_one_has_nobody_to_be_compared_with():
    agent = make_agent(group_baseline=True)
    with pytest.raises(ConfigError, match="one is alone; make groups of at least 2"):
        agent.update(filled_buffer(agent), shuffle())
    check_groups(torch.tensor([3, 0, 3, 0]))


# --- heads by how often they are drawn -----------------------------------------------------------


def every_action() -> list[tuple[int, int, int, int]]:
    """Of 2 slots, 2 blueprints and 1 legal blend."""
    places = list(range(2))
    return [
        (0, 0, 0, int(LifecycleOp.WAIT)),
        *((s, b, 0, int(LifecycleOp.GERMINATE)) for s, b in product(places, places)),
        *((s, 0, 0, int(op)) for op in (LifecycleOp.CULL, LifecycleOp.FOSSILIZE) for s in places),
    ]


def one_step_batch(agent, actions: torch.Tensor) -> SequenceBatch:
    """Rows of one step in one state; `actions` [N, 4] as the policy of now would draw them."""
    rows = len(actions)
    observations = torch.linspace(-1, 1, OBS, dtype=torch.float64).expand(rows, 1, OBS)
    blend = torch.tensor([True, False, False]).expand(rows, 1, 3)
    masks = MaskTensors(
        torch.ones(rows, 1, NUM_OPS, dtype=torch.bool),
        torch.ones(rows, 1, NUM_OPS, 2, dtype=torch.bool),
        torch.ones(rows, 1, 2, 2, dtype=torch.bool),
        blend,
    )
    h, c = agent.initial_hidden(rows)
    hidden = h.double(), c.double()
    log_probs, _, values = agent.network.evaluate_actions(
        observations, actions[:, None], masks, hidden
    )
    ones, zeros = torch.ones(rows, 1, dtype=torch.bool), torch.zeros(rows, 1).double()
    return SequenceBatch(
        torch.arange(rows),
        observations,
        torch.zeros(rows, 1, 0).double(),
        actions[:, None],
        log_probs.detach(),
        values.detach(),
        zeros,
        ones,
        ~ones,
        zeros,
        masks,
        ones,
        hidden,
    )


def test_balanced_heads_have_the_gradient_of_the_joint_policy():
    """Expected over all pairs of actions; unbalanced heads have another one."""
    gradients = {}
    sizes = {"num_slots": 2, "num_blueprints": 2}
    actions = torch.tensor(every_action())
    worth = torch.randn(len(actions), generator=shuffle(5), dtype=torch.float64)
    for balanced in (True, False):
        agent = make_agent(network=sizes, balance_heads=balanced)
        agent.network.double()
        actor = [p for n, p in agent.network.named_parameters() if not n.startswith("value")]
        whole = one_step_batch(agent, actions)
        log_probs, _, _ = agent.network.evaluate_actions(
            whole.observations, whole.actions, whole.masks, whole.hidden
        )
        probabilities = log_probs[:, 0].sum(dim=-1).exp()
        assert probabilities.sum().item() == pytest.approx(1.0)
        exact = torch.autograd.grad((probabilities * worth).sum(), actor, retain_graph=True)
        chances, expected = probabilities.detach(), torch.zeros(()).double()
        for pair in product(range(len(actions)), repeat=2):
            rows = torch.tensor(pair)
            losses = agent._losses(whole.rows(rows), worth[rows][:, None], torch.zeros(2, 1))
            expected = expected - chances[rows].prod() * losses["policy_loss"]
        found = torch.autograd.grad(expected, actor)
        gradients[balanced] = max(
            (a - b).abs().max().item() for a, b in zip(found, exact, strict=True)
        )
    assert gradients[True] < 1e-9
    assert gradients[False] > 1e-2


@pytest.mark.parametrize("balanced", [True, False])
def test_the_weight_of_a_head_is_its_share_of_the_steps_or_one(balanced):
    agent = make_agent(balance_heads=balanced, entropy_coef_per_head={"slot": 0.5})
    batch = filled_buffer(agent, envs=5, steps=7, ends=0.1).sequences()
    advantages = torch.randn(batch.valid.shape, generator=shuffle(2))
    losses = agent._losses(batch, advantages, torch.zeros_like(advantages))
    _, entropies, _ = agent.network.evaluate_actions(
        batch.observations, batch.actions, batch.masks, batch.hidden
    )
    relevant = head_relevance(batch.actions[..., OP]) & batch.valid[..., None]
    policy = bonus = 0.0
    for index, name in enumerate(HEAD_NAMES):
        own = relevant[..., index]
        steps = batch.valid.sum() if balanced else own.sum()
        policy -= (advantages[own].sum() / steps).item()
        coef = 0.5 if name == "slot" else 1.0
        bonus += (coef * entropies[..., index][own].sum() / steps).item()
    assert losses["policy_loss"].item() == pytest.approx(policy, abs=1e-5)
    assert losses["entropy_bonus"].item() == pytest.approx(bonus, abs=1e-5)


# --- a critic that sees more than the actor ------------------------------------------------------


class Told(RandomGrowth):
    """The same episodes whatever critics are told: two numbers that depend on the step."""

    scale = 1.0

    def privileged(self) -> np.ndarray:
        told = np.arange(2 * self.num_envs).reshape(-1, 2) + self.time
        return (self.scale * told).astype(np.float32)


def seeing_agent(kind: str):
    """Its critic has learnt to look."""
    agent = make_agent(network={"privileged_dim": 2}, kind=kind)
    with torch.no_grad():
        agent.network.value_head[0].weight.normal_(0.0, 0.3, generator=shuffle(9))
    return agent


def told_buffer(agent, scale: float, key: int = 0):
    kind = agent.network.config.kind
    env = Told(6, 8, key, ends=0.1, obs=width_of(kind), kind=kind)
    env.scale = scale
    buffer = agent.new_buffer(6, 8)
    play_round(agent, env, buffer, 0, action_draws(0, 0, 6, 8))
    return buffer


@BOTH_KINDS
def test_what_only_the_critic_sees_changes_no_action_and_no_gradient_of_the_policy(kind):
    agent = seeing_agent(kind)
    few, many = (told_buffer(agent, scale).sequences() for scale in (0.1, 3.0))
    for name in ("actions", "log_probs", "observations", "rewards"):
        assert torch.equal(getattr(few, name), getattr(many, name)), name
    assert not torch.equal(few.values, many.values)
    advantages, gradients = torch.randn(few.valid.shape, generator=shuffle(1)), []
    for batch in (few, many):
        loss = agent._losses(batch, advantages, torch.zeros_like(advantages))["policy_loss"]
        actor = [p for n, p in agent.network.named_parameters() if not n.startswith("value")]
        gradients.append(torch.autograd.grad(loss, actor))
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


@BOTH_KINDS
def test_everything_starts_the_same_whatever_the_critic_sees(kind):
    blind, seeing = make_agent(kind=kind), make_agent(network={"privileged_dim": 2}, kind=kind)
    same = dict(parameters_of(seeing))
    same["value_head.0.weight"], more = same["value_head.0.weight"].split(
        [blind.network.value_head[0].in_features, 2], dim=1
    )
    assert (more == 0).all()
    for name, parameter in parameters_of(blind).items():
        assert torch.equal(parameter, same[name]), name


@BOTH_KINDS
def test_values_are_of_what_was_seen_at_the_same_step(kind):
    """Stored values, those of the update and those after a truncated step."""
    agent = seeing_agent(kind)
    buffer = told_buffer(agent, 0.3)
    batch = buffer.sequences()
    steps = torch.arange(batch.valid.shape[1])
    told = 0.3 * (torch.arange(12.0).reshape(6, 1, 2) + steps[:, None])
    assert torch.allclose(batch.privileged[batch.valid], told[batch.valid])
    with torch.no_grad():
        _, _, replayed = agent._evaluate(
            batch.observations, batch.actions, batch.masks, batch.hidden, batch.privileged
        )
    assert torch.allclose(replayed[batch.valid], batch.values[batch.valid], atol=1e-5)
    row = int(batch.truncated.any(dim=1).nonzero()[0])
    end = int(batch.truncated[row].nonzero()[0])
    _, hidden = agent.network.encode(
        batch.observations[row : row + 1, : end + 1], agent.initial_hidden(1)
    )
    env = Told(6, 8, ends=0.1, obs=width_of(kind), kind=kind)
    env.reset(0)
    for step in range(end + 1):
        after, *_ = env.step(buffer.actions[:, step].numpy())
    expected = agent.value(after[row : row + 1], hidden, told[row : row + 1, end] + 0.3)
    assert batch.bootstrap_values[row, end].item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_critic_without_what_it_is_to_see_has_no_opinion_and_the_actor_acts():
    agent = make_agent(network={"privileged_dim": 2})
    env = Told(6, 8)
    observations, masks = env.reset(0)
    hidden = agent.initial_hidden(6)
    alone = agent.act(observations, hidden, masks, None)
    assert alone.values.isnan().all()
    told = agent.act(observations, hidden, masks, None, env.privileged())
    assert told.values.isfinite().all()
    assert (alone.actions == told.actions).all()
    with pytest.raises(ConfigError, match=r"to see arrays \[6, 2\] .* got \[6, 3\]"):
        agent.act(observations, hidden, masks, None, np.zeros((6, 3)))
    with pytest.raises(ValueError, match="what the critic sees must be finite"):
        agent.act(observations, hidden, masks, None, np.full((6, 2), np.nan))
