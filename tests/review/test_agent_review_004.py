"""Review 004 (synthesis): its findings about the agent, one test each."""

import gc
import logging
import math
import weakref

import numpy as np
import pytest
import torch

from agent_support import (
    OBS,
    RandomGrowth,
    filled_buffer,
    make_agent,
    make_network,
    random_masks,
    shuffle,
)
from esper.leyline import OP, ConfigError, LifecycleOp
from esper.simic.agent.advantages import compute_per_head_advantages
from esper.simic.agent.losses import joint_kl, k3_kl
from esper.simic.agent.optimization import clip_gradients
from esper.simic.agent.rollout import action_draws
from esper.simic.agent.saving import agent_from_state, agent_state
from esper.simic.agent.types import MaskTensors
from esper.simic.control import RunningMeanStd


def one_step_batch(agent, envs=60):
    """Episodes of one step, so that rows can be repeated and left out at will."""
    batch = filled_buffer(agent, envs=envs, steps=1).sequences()
    return batch, batch.actions[:, 0, OP]


def losses_of(agent, batch, rows):
    part = batch.rows(rows)
    advantages = torch.linspace(-1, 1, len(batch.valid))[:, None]
    return agent._losses(part, advantages[rows], torch.zeros(len(rows), 1))


def spy_on_evaluate(agent, monkeypatch):
    calls, evaluate = [], agent._evaluate

    def recorded(observations, actions, masks, hidden):
        calls.append((observations, hidden, torch.is_grad_enabled()))
        return evaluate(observations, actions, masks, hidden)

    monkeypatch.setattr(agent, "_evaluate", recorded)
    return calls


def test_004_c3_minibatches_are_whole_environments_in_time_order(monkeypatch):
    agent = make_agent(epochs=3, minibatches=2, target_kl=None)
    buffer = filled_buffer(agent, envs=6)
    buffer.hidden[0].normal_(generator=shuffle())
    calls = spy_on_evaluate(agent, monkeypatch)
    monkeypatch.setattr(agent, "_check_replay", lambda batch: 0.0)
    agent.update(buffer, shuffle(1))
    assert len(calls) == 3 * 2
    orders = []
    for observations, hidden, _ in calls:
        same = (observations[:, None] == buffer.observations[None]).all(dim=-1).all(dim=-1)
        assert (same.sum(dim=1) == 1).all()
        rows = same.int().argmax(dim=1)
        assert torch.equal(hidden[0], buffer.hidden[0][:, rows])
        orders.append(rows.tolist())
    epochs = [orders[i] + orders[i + 1] for i in range(0, 6, 2)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_004_c4_values_at_the_start_of_an_update_are_the_stored_ones():
    agent = make_agent(value_clip=0.2)
    batch = filled_buffer(agent, steps=30).sequences()
    _, _, values = agent._evaluate(batch.observations, batch.actions, batch.masks, batch.hidden)
    torch.testing.assert_close(values, batch.values, rtol=0, atol=1e-5)


def test_004_c5_statistics_include_the_batch_and_the_ratio_is_still_one():
    agent, normalizer = make_agent(), RunningMeanStd((OBS,), epsilon=1e-12)
    env, buffer, hidden = RandomGrowth(4, 6), agent.new_buffer(4, 6), agent.initial_hidden(4)
    buffer.start(hidden)
    raw, masks = env.reset(0)
    draws, raws = action_draws(0, 0, 4, 6), []
    for step in range(6):
        raws.append(torch.from_numpy(raw))
        normalizer.update(raws[-1])
        seen = normalizer.normalize(raws[-1])
        decision = agent.act(seen, hidden, masks, draws[:, step])
        hidden, offered = decision.hidden, masks
        raw, masks, rewards, terminated, truncated = env.step(decision.actions)
        buffer.add(seen, offered, decision, rewards, terminated, truncated, np.zeros(4))
    np.testing.assert_allclose(normalizer.mean, torch.cat(raws).double().mean(0), atol=1e-9)
    assert agent.update(buffer, shuffle()).replay_error < 1e-5


def test_004_h3_entropy_is_averaged_over_relevant_steps():
    agent = make_agent()
    batch, ops = one_step_batch(agent)
    wait = (ops == LifecycleOp.WAIT).nonzero().squeeze(1)
    everything = torch.arange(len(ops))
    once = losses_of(agent, batch, everything)["head_entropies"]
    twice = losses_of(agent, batch, torch.cat([everything, wait, wait]))["head_entropies"]
    for head in range(OP):
        assert twice[head].item() == pytest.approx(once[head].item(), rel=1e-5)
    assert twice[OP].item() != pytest.approx(once[OP].item(), rel=1e-5)
    only_wait = losses_of(agent, batch, wait)["head_entropies"]
    assert only_wait[:OP].tolist() == [0.0, 0.0, 0.0]
    assert all(math.isfinite(x) for x in only_wait.tolist())


def test_004_h4_value_of_the_next_state_needs_no_masks():
    """V(s') is a function of observation and hidden state; stale masks cannot enter it."""
    agent, rng = make_agent(), np.random.default_rng(0)
    states, hidden = rng.normal(size=(5, OBS)).astype(np.float32), agent.initial_hidden(5)
    values = agent.value(states, hidden)
    for _ in range(3):
        decision = agent.act(states, hidden, random_masks(rng, 5), rng.random((5, 4)))
        assert torch.equal(decision.values, values)


def test_004_h5_later_epochs_recompute_hidden_states_with_the_new_parameters():
    agent = make_agent(epochs=3, minibatches=1, target_kl=None, learning_rate=1e-2)
    buffer = filled_buffer(agent, envs=3)
    agent.update(buffer, shuffle())
    batch = buffer.sequences()
    with torch.no_grad():
        replayed, _, _ = agent._evaluate(
            batch.observations, batch.actions, batch.masks, batch.hidden
        )
        hidden, stepped = batch.hidden, []
        for t in range(batch.valid.shape[1]):
            features, hidden = agent.network.encode(batch.observations[:, t], hidden)
            _, log_probs, _, _ = agent.network.decide(
                features,
                MaskTensors(*(mask[:, t] for mask in batch.masks)),
                actions=batch.actions[:, t],
            )
            stepped.append(log_probs)
    torch.testing.assert_close(replayed, torch.stack(stepped, 1), rtol=1e-4, atol=1e-5)
    assert (replayed - batch.log_probs).abs().max() > 1e-3


def test_004_h6_heads_that_were_not_drawn_add_no_kl():
    agent = make_agent()
    batch, ops = one_step_batch(agent)
    with torch.no_grad():
        for head in (agent.network.slot_head, agent.network.blueprint_head):
            head[2].bias.copy_(torch.linspace(-3, 3, len(head[2].bias)))
    wait = (ops == LifecycleOp.WAIT).nonzero().squeeze(1)
    assert losses_of(agent, batch, wait)["approx_kl"].item() == pytest.approx(0.0, abs=1e-9)
    other = (ops != LifecycleOp.WAIT).nonzero().squeeze(1)
    assert losses_of(agent, batch, other)["approx_kl"].item() > 0.01


def test_004_h7_the_network_keeps_no_table_of_maximal_entropies():
    network = make_network()
    known = {"config", "training", *network._modules}
    extra = {name for name in vars(network) if not name.startswith("_")} - known
    assert not extra


def test_004_m6_nothing_of_the_file_survives_loading():
    agent = make_agent()
    agent.update(filled_buffer(agent), shuffle())
    tensors, meta = agent_state(agent)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    alive = [weakref.ref(tensor) for tensor in tensors.values()]
    loaded = agent_from_state(tensors, meta)
    del tensors
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]
    assert loaded.update_count == 1
    assert loaded.optimizer.state


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_004_m7_both_layer_norms_keep_the_scale(scale):
    """The LSTM sees one scale of inputs, the heads one scale of outputs, whatever comes in."""
    network, seen = make_network(feature_dim=64, lstm_hidden_dim=64), {}
    network.lstm.register_forward_pre_hook(lambda _, args: seen.update(inputs=args[0]))
    states = scale * torch.randn(4, 25, OBS, generator=shuffle())
    features, _ = network.encode(states, network.get_initial_hidden(4))
    assert 0.3 < seen["inputs"].square().mean().sqrt() < 1.2
    rms = features.square().mean(dim=-1).sqrt()
    assert (rms - 1.0).abs().max() < 0.05


def test_004_m8_advantages_of_the_op_are_the_given_tensor():
    advantages = torch.randn(4, 6, generator=shuffle())
    before = advantages.clone()
    per_head = compute_per_head_advantages(advantages, torch.zeros(4, 6, dtype=torch.long))
    assert per_head["op"] is advantages
    assert torch.equal(advantages, before)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_004_m9_forget_biases_start_at_one_and_all_others_at_zero(layers):
    network = make_network(lstm_layers=layers)
    biases = [p for name, p in network.lstm.named_parameters() if "bias" in name]
    assert len(biases) == 2 * layers
    for bias in biases:
        i, f, g, o = bias.chunk(4)
        assert (f == 1).all()
        assert (torch.cat([i, g, o]) == 0).all()


def test_004_m11_entropy_is_a_number_between_zero_and_one():
    agent = make_agent(network={"actor_gain": 1e-3})
    metrics = agent.update(filled_buffer(agent, envs=20), shuffle())
    assert 0.5 < metrics.entropy <= 1.0
    assert all(0.0 <= entropy <= 1.0 for entropy in metrics.head_entropies.values())


def test_004_m12_metrics_carry_advantage_statistics_before_normalisation():
    agent = make_agent(gamma=0.0, gae_lambda=0.0)
    buffer = filled_buffer(agent)
    expected = (buffer.rewards - buffer.values).numpy()
    metrics = agent.update(buffer, shuffle())
    assert metrics.advantage_mean == pytest.approx(expected.mean(), rel=1e-4)
    assert metrics.advantage_std == pytest.approx(expected.std(), rel=1e-4)
    assert metrics.advantage_min == pytest.approx(expected.min(), rel=1e-4)
    assert metrics.advantage_max == pytest.approx(expected.max(), rel=1e-4)
    assert metrics.ratio_std > 0


def test_004_m13_the_gradient_norm_is_that_before_clipping():
    loose, tight = make_agent(max_grad_norm=1e6), make_agent(max_grad_norm=1e-3)
    norms = [a.update(filled_buffer(a), shuffle()).flat()["grad_norm_max"] for a in (loose, tight)]
    assert min(norms) > 1e-2


def test_004_m19_a_huge_critic_gradient_leaves_the_actor_alone_when_clipped_apart():
    network = make_network()
    for name, parameter in network.named_parameters():
        parameter.grad = torch.full_like(parameter, 1e6 if "value_head" in name else 1e-4)
    before = network.op_head[0].weight.grad.clone()
    clip_gradients(network, 0.5, separately=True)
    assert torch.equal(network.op_head[0].weight.grad, before)
    critic = torch.cat([p.grad.flatten() for p in network.value_head.parameters()])
    assert critic.norm().item() == pytest.approx(0.5, rel=1e-3)
    total = clip_gradients(network, 1e-3, separately=False)
    assert total.item() == pytest.approx(0.5, rel=0.1)
    assert (network.op_head[0].weight.grad < before).all()


def test_004_m19_clipping_apart_is_a_setting_of_the_update():
    """Under the norm of a huge critic the op head hardly moves, unless it is clipped apart."""
    moved = []
    for apart in (False, True):
        agent = make_agent(value_coef=1e6, clip_separately=apart, epochs=1, minibatches=1)
        before = agent.network.op_head[2].bias.detach().clone()
        agent.update(filled_buffer(agent), shuffle())
        moved.append((agent.network.op_head[2].bias - before).norm().item())
    assert moved[1] > 10 * moved[0]


def test_004_m20_kl_is_the_sum_over_heads_weighted_by_their_share_of_steps():
    log_ratio = torch.tensor([[0.2, 0.0, 0.0, 0.1], [0.0, 0.0, 0.0, -0.3]])
    relevant = torch.tensor([[True, False, False, True], [False, False, False, True]])
    k = k3_kl(log_ratio)
    by_hand = 0.5 * k[0, 0] + 1.0 * (k[0, 3] + k[1, 3]) / 2
    assert joint_kl(log_ratio, relevant).item() == pytest.approx(by_hand.item(), rel=1e-6)


@pytest.mark.parametrize(("explosion", "found"), [(1e9, False), (1.0 + 1e-6, True)])
def test_004_m21_ratio_thresholds_are_settings(explosion, found):
    agent = make_agent(ratio_explosion=explosion, ratio_collapse=0.0, learning_rate=1e-2)
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert (metrics.ratio_outliers > 0) is found


def test_004_m22_compiling_uses_dynamic_shapes_and_a_failure_is_logged(monkeypatch, caplog):
    asked = {}

    def failing(function, **settings):
        asked.update(settings)

        def call(*args):
            raise torch._dynamo.exc.TorchDynamoException("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", failing)
    agent = make_agent(compile_backend="inductor")
    with caplog.at_level(logging.WARNING):
        metrics = agent.update(filled_buffer(agent), shuffle())
    assert asked == {"backend": "inductor", "dynamic": True}
    assert "failed for evaluate_actions, running eagerly: no compiler here" in caplog.text
    assert metrics.optimizer_steps > 0


def test_004_m22_an_unknown_compiler_is_refused():
    with pytest.raises(ConfigError, match="compile_backend 'nonsense'"):
        make_agent(compile_backend="nonsense")


def test_004_m23_ema_of_a_constant_converges_to_it():
    running = RunningMeanStd((2,), momentum=0.9)
    running.update(torch.randn(16, 2, generator=shuffle()))
    for _ in range(300):
        running.update(torch.full((8, 2), 7.0))
    np.testing.assert_allclose(running.mean, 7.0, atol=1e-9)
    np.testing.assert_allclose(running.var, 0.0, atol=1e-9)


def test_004_m23_a_shift_of_the_mean_adds_its_cross_term():
    momentum, delta = 0.9, 5.0
    running = RunningMeanStd((1,), momentum=momentum)
    running.update(torch.zeros(4, 1))
    running.update(torch.full((4, 1), delta))
    assert running.mean.item() == pytest.approx((1 - momentum) * delta)
    assert running.var.item() == pytest.approx(momentum * (1 - momentum) * delta**2)


def test_004_gap7_per_head_entropy_masking_gives_no_gradient_to_ignored_heads():
    agent = make_agent()
    batch, ops = one_step_batch(agent)
    wait = (ops == LifecycleOp.WAIT).nonzero().squeeze(1)
    losses_of(agent, batch, wait)["entropy_bonus"].backward()
    for name in ("slot", "blueprint", "blend"):
        gradients = [p.grad for p in agent.network.head(name).parameters()]
        assert all(g is None or (g == 0).all() for g in gradients)
    assert any((p.grad != 0).any() for p in agent.network.op_head.parameters())
