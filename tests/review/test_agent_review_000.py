"""Review 000 (agent, reinforcement learning): its findings, one test each."""

import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn

from agent_support import (
    OBS,
    filled_buffer,
    make_agent,
    make_network,
    mask_tensors,
    parameters_of,
    random_masks,
    shuffle,
)
from esper.leyline import HEAD_NAMES, OP, RELEVANT_HEADS, ConfigError, LifecycleOp
from esper.simic.agent import NetworkConfig, TamiyoRolloutBuffer, saving
from esper.simic.agent.advantages import (
    compute_gae,
    compute_per_head_advantages,
    head_relevance,
    normalize_advantages,
)
from esper.simic.agent.losses import value_errors
from esper.simic.agent.saving import agent_from_state, agent_state
from esper.simic.agent.types import MetricLists, PPOUpdateMetrics
from esper.simic.telemetry import gradient_collector
from esper.tamiyo.policy import masked_categorical
from esper.tamiyo.policy.masked_categorical import MaskedCategorical


def test_000_h1_hidden_states_are_recomputed_in_every_epoch():
    """A hidden state saved at a later step does not exist, so none can be stale."""
    buffer = make_agent().new_buffer(5, 9)
    assert all(part.shape == (1, 5, 16) for part in buffer.hidden)


def blueprint_entropy_gradient(agent, batch, rows):
    agent.network.zero_grad()
    part = batch.rows(rows)
    terms = agent._losses(part, torch.zeros(len(rows), 1), torch.zeros(len(rows), 1))
    terms["entropy_bonus"].backward()
    return torch.cat([p.grad.flatten() for p in agent.network.blueprint_head.parameters()])


def test_000_h2_entropy_gradient_of_a_rare_head_does_not_depend_on_how_rare_it_is():
    agent = make_agent()
    batch = filled_buffer(agent, envs=60, steps=1).sequences()
    ops = batch.actions[:, 0, OP]
    rows = torch.arange(len(ops))
    wait = (ops == LifecycleOp.WAIT).nonzero().squeeze(1)
    rare = blueprint_entropy_gradient(agent, batch, torch.cat([rows, wait, wait, wait]))
    usual = blueprint_entropy_gradient(agent, batch, rows)
    assert usual.norm() > 0
    torch.testing.assert_close(rare, usual, rtol=1e-4, atol=1e-7)


def test_000_h2_a_coefficient_per_head_scales_exactly_its_own_term():
    plain = make_agent()
    doubled = make_agent(entropy_coef_per_head={"blueprint": 2.0})
    batch = filled_buffer(plain, envs=60, steps=1).sequences()
    rows = torch.arange(60)
    once, twice = (blueprint_entropy_gradient(a, batch, rows) for a in (plain, doubled))
    torch.testing.assert_close(twice, 2 * once)


def test_000_h3_only_drawn_heads_count_in_the_kl():
    agent = make_agent()
    batch = filled_buffer(agent, envs=60, steps=1).sequences()
    with torch.no_grad():
        agent.network.blend_head[2].bias.copy_(torch.tensor([2.0, 0.0, -2.0]))
    not_germinate = (batch.actions[:, 0, OP] != LifecycleOp.GERMINATE).nonzero().squeeze(1)
    zeros = torch.zeros(len(not_germinate), 1)
    kl = agent._losses(batch.rows(not_germinate), zeros, zeros)["approx_kl"]
    assert kl.item() == pytest.approx(0.0, abs=1e-9)


def test_000_m1_huber_bounds_the_gradient_of_huge_errors():
    values = torch.tensor([1e6, -1e6, 0.1], requires_grad=True)
    zeros = torch.zeros(3)
    value_errors(values, zeros, zeros, huber_delta=2.0).sum().backward()
    assert values.grad.tolist() == pytest.approx([2.0, -2.0, 0.1])
    squared = torch.tensor([1e3], requires_grad=True)
    value_errors(squared, zeros[:1], zeros[:1]).sum().backward()
    assert squared.grad.item() == pytest.approx(2e3)


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_000_m1_the_value_loss_is_a_setting_of_the_update(loss):
    agent = make_agent(value_loss=loss, huber_delta=0.5, epochs=1, minibatches=1)
    buffer = filled_buffer(agent)
    batch = buffer.sequences()
    _, returns = compute_gae(
        batch.rewards,
        batch.values,
        batch.bootstrap_values,
        batch.terminated,
        batch.truncated,
        agent.config.gamma,
        agent.config.gae_lambda,
    )
    expected = {
        "mse": nn.functional.mse_loss(batch.values, returns),
        "huber": nn.functional.huber_loss(batch.values, returns, delta=0.5),
    }[loss]
    metrics = agent.update(buffer, shuffle())
    assert metrics.value_loss == pytest.approx(expected.item(), rel=1e-4)


def test_000_m2_almost_constant_advantages_stay_small():
    advantages = 3.0 + 1e-6 * torch.randn(2, 10, generator=shuffle())
    normalized = normalize_advantages(advantages, torch.ones(2, 10, dtype=torch.bool))
    assert normalized.isfinite().all()
    assert normalized.abs().max() < 1e-2


def test_000_m3_the_reported_gradient_norm_is_above_the_limit_when_clipping_acted():
    agent = make_agent(max_grad_norm=1e-3)
    assert agent.update(filled_buffer(agent), shuffle()).grad_norm > 1e-3


def test_000_m4_an_update_depends_on_the_first_hidden_state_only():
    """Of hidden states nothing but [layers, environments, width] is stored at all."""
    agent = make_agent()
    buffer = filled_buffer(agent, envs=4, steps=10)
    size = sum(part.numel() for part in buffer.hidden)
    assert size == 2 * 4 * 16
    assert "hidden" in buffer.__doc__


def test_000_m5_validation_can_be_switched_off_and_then_waits_for_nothing(monkeypatch):
    logits, mask = torch.zeros(2, 3), torch.tensor([[True] * 3, [False] * 3])
    with pytest.raises(RuntimeError, match="no legal action"):
        MaskedCategorical(logits, mask)
    with pytest.raises(ValueError, match="1 NaN"):
        MaskedCategorical(torch.tensor([[torch.nan, 0.0]]), torch.ones(1, 2, dtype=torch.bool))
    monkeypatch.setattr(MaskedCategorical, "validate", False)

    def synchronised(self):
        raise AssertionError("read a tensor back")

    for name in ("__bool__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, synchronised)
    MaskedCategorical(logits, mask)


def test_000_m6_the_first_policy_is_near_uniform_and_the_gain_is_a_setting():
    default = NetworkConfig(OBS, 3, 5).actor_gain
    states, masks = (
        torch.randn(64, OBS, generator=shuffle()),
        random_masks(np.random.default_rng(0), 64),
    )

    def spread(gain):
        network = make_network(actor_gain=gain, lstm_hidden_dim=128, feature_dim=128)
        features, _ = network.encode(states, network.get_initial_hidden(64))
        _, _, distributions, _ = network.decide(features, mask_tensors(masks))
        legal = distributions[OP].mask
        uniform = legal / legal.sum(-1, keepdim=True)
        return (distributions[OP].probs - uniform).abs().max().item()

    assert default == 0.01
    assert spread(default) < 0.05
    assert spread(1.0) > spread(default)


def test_000_l1_the_feature_net_has_one_layer():
    network = make_network()
    assert sum(isinstance(m, nn.Linear) for m in network.feature_net) == 1
    assert "Linear, LayerNorm, ReLU" in network.__doc__


def test_000_l2_an_unknown_newer_format_is_refused():
    tensors, meta = agent_state(make_agent())
    meta["version"] = saving.FORMAT_VERSION + 1
    with pytest.raises(ConfigError, match="newer version"):
        agent_from_state(tensors, meta)


def test_000_l2_every_format_says_what_it_holds():
    source = inspect.getsource(saving)
    for version in range(1, saving.FORMAT_VERSION + 1):
        assert re.search(rf"^# {version}: .+", source, re.MULTILINE), version


def test_000_l3_metrics_are_lists_while_collecting_and_scalars_in_the_result():
    assert all(isinstance(value, list) for value in vars(MetricLists()).values())
    agent = make_agent()
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert isinstance(metrics, PPOUpdateMetrics)
    for name, value in metrics.flat().items():
        assert value is None or isinstance(value, int | float | str), name


@pytest.mark.parametrize(("hidden", "width"), [(8, 32), (64, 32), (128, 64)])
def test_000_l4_heads_have_a_least_width(hidden, width):
    network = make_network(lstm_hidden_dim=hidden, head_width=None)
    assert network.op_head[0].out_features == width
    assert make_network(head_width=7).op_head[0].out_features == 7


def test_000_l5_entropy_of_one_legal_action_is_exactly_zero_with_zero_gradient():
    logits = torch.randn(3, 4, generator=shuffle(), requires_grad=True)
    mask = torch.tensor([[True, False, False, False]] * 3)
    entropy = MaskedCategorical(logits, mask).entropy()
    entropy.sum().backward()
    assert entropy.tolist() == [0.0] * 3
    assert (logits.grad == 0).all()


def test_000_a1_one_order_of_heads_everywhere():
    agent = make_agent()
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert tuple(metrics.head_entropies) == HEAD_NAMES
    assert tuple(metrics.head_grad_norms) == (*HEAD_NAMES, "value")
    ops = torch.arange(4)
    assert tuple(compute_per_head_advantages(torch.ones(4), ops)) == HEAD_NAMES


def test_000_a2_advantages_and_losses_use_the_same_causal_table():
    ops = torch.arange(4)
    per_head = compute_per_head_advantages(torch.ones(4), ops)
    relevant = head_relevance(ops)
    for op in LifecycleOp:
        for index, name in enumerate(HEAD_NAMES):
            expected = name in RELEVANT_HEADS[op]
            assert relevant[op, index].item() is expected
            assert bool(per_head[name][op]) is expected


def test_000_a3_hidden_states_round_trip_through_the_buffer():
    agent = make_agent(network={"lstm_layers": 2})
    buffer = filled_buffer(agent, envs=5)
    hidden = tuple(torch.randn(2, 5, 16, generator=shuffle(key)) for key in (0, 1))
    for own, given in zip(buffer.hidden, hidden, strict=True):
        own.copy_(given)
    rows = torch.tensor([3, 0])
    batch = buffer.sequences().rows(rows)
    for replayed, given in zip(batch.hidden, hidden, strict=True):
        assert torch.equal(replayed, given[:, rows])


@pytest.mark.parametrize("change", [{"num_slots": 4}, {"lstm_hidden_dim": 8}])
def test_000_a4_a_buffer_of_other_sizes_is_refused(change):
    agent = make_agent()
    other = TamiyoRolloutBuffer(2, 3, make_network(**change).config)
    with pytest.raises(ConfigError, match="buffer was made for"):
        agent.update(other, shuffle())


def test_000_a5_what_cannot_be_compiled_is_excluded_by_name():
    for function in (compute_gae, masked_categorical._check, gradient_collector.start_collecting):
        assert function._torchdynamo_disable


def test_000_a6_entropy_is_normalised_in_one_place():
    """A uniform policy has entropy 1 wherever there is a choice, whatever the head's size."""
    agent = make_agent()
    with torch.no_grad():
        for name in HEAD_NAMES:
            agent.network.head(name)[2].weight.zero_()
    batch = filled_buffer(agent, envs=30).sequences()
    _, entropies, _ = agent.network.evaluate_actions(
        batch.observations, batch.actions, batch.masks, batch.hidden
    )
    values = entropies[entropies != 0]
    assert (entropies != 0).any(dim=0).any(dim=0).all()
    torch.testing.assert_close(values, torch.ones_like(values))


def test_000_ppo_kl_stops_before_the_step():
    agent = make_agent(target_kl=1e-9, epochs=4, minibatches=1, learning_rate=1e-2)
    metrics = agent.update(filled_buffer(agent), shuffle())
    # The first pass has KL 0 and steps; the second exceeds the target and must not step.
    assert metrics.optimizer_steps == 1
    assert metrics.early_stop_epoch == 1
    assert metrics.approx_kl_max > 1.5e-9


def test_000_ppo_pessimistic_value_clip_holds_the_critic_back():
    free = make_agent(epochs=8, minibatches=1, target_kl=None, learning_rate=1e-2)
    held = make_agent(epochs=8, minibatches=1, target_kl=None, learning_rate=1e-2, value_clip=0.01)
    moved = []
    for agent in (free, held):
        buffer = filled_buffer(agent)
        batch = buffer.sequences()
        agent.update(buffer, shuffle())
        with torch.no_grad():
            _, _, values = agent.network.evaluate_actions(
                batch.observations, batch.actions, batch.masks, batch.hidden
            )
        moved.append((values - batch.values).abs().mean().item())
    assert moved[1] < 0.7 * moved[0]


def test_000_ppo_entropy_rises_when_its_coefficient_dominates():
    agent = make_agent(entropy_coef=100.0, learning_rate=3e-3, target_kl=None)
    first = agent.update(filled_buffer(agent), shuffle()).entropy
    for round_ in range(10):
        last = agent.update(filled_buffer(agent, key=round_), shuffle()).entropy
    assert last > first + 0.05
    assert all(p.isfinite().all() for p in parameters_of(agent).values())
