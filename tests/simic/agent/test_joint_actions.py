"""The factored policy against brute force: every joint action of a small problem, enumerated."""

from itertools import product

import numpy as np
import pytest
import torch

from agent_support import (
    BLUEPRINTS,
    BOTH_KINDS,
    SLOTS,
    as_observations,
    make_network,
    mask_tensors,
    random_masks,
    width_of,
)
from esper.leyline import HEAD_NAMES, HEAD_RELEVANCE, ActionMasks, LifecycleOp
from esper.simic.agent.advantages import compute_per_head_advantages
from esper.simic.agent.types import MaskTensors
from esper.tamiyo.policy.masked_categorical import MaskedCategorical

SIZES = (SLOTS, BLUEPRINTS, 3, 4)


def legal_joint_actions(masks: ActionMasks) -> np.ndarray:
    """All legal actions of environment 0 with index 0 in the heads their op ignores."""
    actions = []
    for slot, blueprint, blend, op in product(*map(range, SIZES)):
        action = np.array([slot, blueprint, blend, op])
        if (action[~HEAD_RELEVANCE[op]] == 0).all() and masks.allows(action[None])[0]:
            actions.append(action)
    return np.array(actions)


def evaluated(network, observation, masks, actions):
    """(log-probs, entropies) [n, 4] of n actions in one and the same state."""
    n = len(actions)
    log_probs, entropies, _ = network.evaluate_actions(
        observation.expand(n, -1),
        torch.from_numpy(actions),
        MaskTensors(*(mask.expand(n, *mask.shape[1:]) for mask in mask_tensors(masks))),
        network.get_initial_hidden(n),
    )
    return log_probs, entropies


def state(key: int, kind: str = "flat"):
    rng = np.random.default_rng(key)
    network = make_network(key, kind)
    seen = as_observations(rng.normal(size=(1, width_of(kind))), kind, SLOTS, BLUEPRINTS)
    return network, torch.from_numpy(seen), random_masks(rng, 1)


@pytest.mark.parametrize("key", range(8))
@BOTH_KINDS
def test_probabilities_of_all_joint_actions_sum_to_one(key, kind):
    network, observation, masks = state(key, kind)
    actions = legal_joint_actions(masks)
    log_probs, _ = evaluated(network, observation, masks, actions)
    assert log_probs.sum(-1).exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    irrelevant = ~HEAD_RELEVANCE[actions[:, 3]]
    assert (log_probs.detach().numpy()[irrelevant] == 0.0).all()


def nats(entropies: torch.Tensor, masks: ActionMasks, actions: np.ndarray) -> np.ndarray:
    """Undo the normalisation of each head's entropy by the number of its legal actions."""
    slot, _, _, op = actions.T
    legal = np.stack(
        [
            masks.slot[0, op].sum(-1),
            masks.blueprint[0, slot].sum(-1),
            np.full(len(actions), masks.blend[0].sum()),
            np.full(len(actions), masks.op[0].sum()),
        ],
        axis=-1,
    )
    return entropies.numpy() * np.log(np.maximum(legal, 2))


@pytest.mark.parametrize("key", range(8))
@BOTH_KINDS
def test_entropy_obeys_the_chain_rule(key, kind):
    """Joint entropy = expected sum over heads of the entropy of each conditional choice."""
    network, observation, masks = state(key, kind)
    actions = legal_joint_actions(masks)
    with torch.no_grad():
        log_probs, entropies = evaluated(network, observation, masks, actions)
    joint = log_probs.sum(-1)
    exact = -(joint.exp() * joint).sum().item()
    chained = (joint.exp().numpy()[:, None] * nats(entropies, masks, actions)).sum()
    assert chained == pytest.approx(exact, abs=1e-5)


@BOTH_KINDS
def test_drawn_actions_are_legal_and_have_the_frequencies_of_the_enumeration(kind):
    network, observation, masks = state(1, kind)
    actions = legal_joint_actions(masks)
    with torch.no_grad():
        log_probs, _ = evaluated(network, observation, masks, actions)
        n = 20_000
        features, _ = network.encode(observation.expand(n, -1), network.get_initial_hidden(n))
        wide = MaskTensors(*(mask.expand(n, *mask.shape[1:]) for mask in mask_tensors(masks)))
        draws = torch.from_numpy(np.random.default_rng(0).random((n, 4)))
        drawn, drawn_log_probs, _, _ = network.decide(features, wide, draws=draws)
    seen = {tuple(a): i for i, a in enumerate(actions.tolist())}
    index = [seen[tuple(a)] for a in drawn.tolist()]
    frequencies = np.bincount(index, minlength=len(actions)) / n
    expected = log_probs.sum(-1).exp().numpy()
    assert np.abs(frequencies - expected).max() < 5 * np.sqrt(expected.max() / n)
    torch.testing.assert_close(drawn_log_probs, log_probs[index], rtol=1e-4, atol=1e-5)


class TinyPolicy:
    """Independent logits for every conditional choice, so that irrelevant heads can be sampled.

    Joint credit draws all four heads whatever the op and gives each the full advantage; causal
    credit gives the advantage only to those the table makes relevant.
    """

    sizes = (2, 3, 2, 4)

    def __init__(self, key: int):
        gen = torch.Generator().manual_seed(key)
        self.logits = [
            torch.randn(n, generator=gen, dtype=torch.float64, requires_grad=True)
            for n in self.sizes
        ]
        self.actions = torch.tensor(list(product(*map(range, self.sizes))))
        # The outcome depends on relevant choices only.
        relevant = torch.from_numpy(HEAD_RELEVANCE.copy())[self.actions[:, 3]]
        table = torch.randn(self.sizes, generator=gen, dtype=torch.float64)
        self.outcome = table[tuple((self.actions * relevant).T)]

    def log_probs(self) -> torch.Tensor:
        each = [
            MaskedCategorical(logits, torch.ones(len(logits), dtype=torch.bool)).logits[chosen]
            for logits, chosen in zip(self.logits, self.actions.T, strict=True)
        ]
        return torch.stack(each, dim=-1)

    def score_gradients(self, credit: torch.Tensor) -> torch.Tensor:
        """Gradient [action, parameter] of Σ_h credit_h log π_h for each single action."""
        rows = []
        for row in (credit * self.log_probs()).sum(-1):
            gradients = torch.autograd.grad(row, self.logits, retain_graph=True)
            rows.append(torch.cat(gradients))
        return torch.stack(rows)


@pytest.mark.parametrize("key", range(3))
def test_causal_credit_is_unbiased_and_has_less_variance_than_joint_credit(key):
    policy = TinyPolicy(key)
    probability = policy.log_probs().sum(-1).exp()
    exact = torch.cat(
        torch.autograd.grad((probability * policy.outcome).sum(), policy.logits, retain_graph=True)
    )
    probability = probability.detach()
    advantages = policy.outcome - (probability * policy.outcome).sum()

    per_head = compute_per_head_advantages(advantages, policy.actions[:, 3])
    causal = policy.score_gradients(torch.stack([per_head[name] for name in HEAD_NAMES], dim=-1))
    joint = policy.score_gradients(advantages[:, None].expand(-1, 4))

    def moments(gradients):
        mean = (probability[:, None] * gradients).sum(0)
        return mean, (probability[:, None] * (gradients - mean).square()).sum(0)

    (causal_mean, causal_var), (joint_mean, joint_var) = moments(causal), moments(joint)
    torch.testing.assert_close(causal_mean, exact)
    torch.testing.assert_close(joint_mean, exact)
    split = np.cumsum(TinyPolicy.sizes)[:-1]
    for name, ours, theirs in zip(
        HEAD_NAMES,
        np.split(causal_var.numpy(), split),
        np.split(joint_var.numpy(), split),
        strict=True,
    ):
        if name == "op":
            np.testing.assert_allclose(ours, theirs)
        else:
            assert (ours < theirs).all()


def test_an_irrelevant_head_may_have_an_empty_mask():
    network, observation, masks = state(0)
    empty = ActionMasks(
        op=np.array([[True, False, False, False]]),
        slot=np.zeros_like(masks.slot),
        blueprint=np.zeros_like(masks.blueprint),
        blend=np.zeros_like(masks.blend),
    )
    wait = np.array([[0, 0, 0, int(LifecycleOp.WAIT)]])
    log_probs, entropies = evaluated(network, observation, empty, wait)
    assert log_probs.tolist() == [[0.0] * 4]
    assert entropies.tolist() == [[0.0] * 4]
