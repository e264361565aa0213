"""Review 001 (ppo.py): its findings about the agent, one test each."""

import math
from collections import Counter

import pytest
import torch

from agent_support import filled_buffer, make_agent, parameters_of, shuffle
from esper.leyline import HEAD_NAMES, LifecycleOp
from esper.simic.agent import saving
from esper.simic.agent.losses import value_errors
from esper.simic.agent.optimization import make_optimizer
from esper.simic.agent.ppo import entropy_floor_scale
from esper.simic.agent.saving import load_agent, save_agent


def test_001_h1_head_gradient_norms_are_those_of_the_plain_module():
    agent = make_agent(epochs=1, minibatches=1, max_grad_norm=1e9)
    metrics = agent.update(filled_buffer(agent), shuffle())
    for name in (*HEAD_NAMES, "value"):
        gradients = [p.grad.flatten() for p in agent.network.head(name).parameters()]
        norm = torch.cat(gradients).norm().item()
        assert metrics.head_grad_norms[name] == pytest.approx(norm, rel=1e-5)


def test_001_h2_the_adaptive_floor_receives_the_masks_of_the_batch():
    settings = {"entropy_coef": 0.01, "entropy_coef_min": 0.01}
    plain = make_agent(**settings)
    adaptive = make_agent(**settings, adaptive_entropy_floor=True)
    buffer = filled_buffer(plain)
    batch = buffer.sequences()
    legal = batch.masks.op[batch.valid].float().sum(-1).mean().item()
    assert plain.update(buffer, shuffle()).entropy_coef == 0.01
    coef = adaptive.update(filled_buffer(adaptive), shuffle()).entropy_coef
    assert coef == pytest.approx(0.01 * math.log(4) / math.log(legal), rel=1e-6)
    assert coef > 0.01


@pytest.mark.parametrize(
    ("legal", "scale"), [(1, 1.0), (2, 2.0), (3, math.log(4) / math.log(3)), (4, 1.0)]
)
def test_001_h2_the_floor_rises_as_fewer_ops_are_legal(legal, scale):
    masks = (torch.arange(4) < legal).expand(7, 4)
    assert entropy_floor_scale(masks) == pytest.approx(scale, rel=1e-6)


def test_001_h2_the_floor_rises_threefold_at_most():
    masks = torch.ones(100, 4, dtype=torch.bool)
    masks[:, 1:] = False
    masks[:5, 1] = True
    assert entropy_floor_scale(masks) == 3.0


def test_001_h2_the_coefficient_anneals_linearly():
    agent = make_agent(entropy_coef=0.3, entropy_coef_end=0.1, entropy_anneal_updates=4)
    coefs = [agent.update(filled_buffer(agent), shuffle()).entropy_coef for _ in range(6)]
    assert coefs == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1, 0.1])


def reads(monkeypatch, **config):
    """How often an update with these settings reads tensors back, by method."""
    agent = make_agent(target_kl=None, **config)
    buffer = filled_buffer(agent)
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for name in ("item", "tolist"):
            original = getattr(torch.Tensor, name)

            def counted(self, name=name, original=original):
                counts[name] += 1
                return original(self)

            patch.setattr(torch.Tensor, name, counted)
        agent.update(buffer, shuffle())
    return counts


def test_001_m1_a_minibatch_reads_back_once_before_and_once_after_its_gradient(monkeypatch):
    few = reads(monkeypatch, epochs=1, minibatches=1)
    many = reads(monkeypatch, epochs=6, minibatches=1)
    assert many - few == Counter(tolist=2 * 5)


def test_001_m2_value_clip_is_independent_of_the_ratio_and_can_be_off():
    values, old, returns = torch.tensor([5.0]), torch.zeros(1), torch.tensor([5.0])
    assert value_errors(values, returns, old, clip=None).item() == 0.0
    assert value_errors(values, returns, old, clip=1.0).item() == 16.0
    assert make_agent().config.value_clip is None
    assert make_agent(value_clip=3.0).config.clip_ratio == make_agent().config.clip_ratio


def test_001_m3_the_policy_loss_is_a_tensor_on_the_device():
    agent = make_agent()
    batch = filled_buffer(agent).sequences()
    losses = agent._losses(batch, torch.zeros(6, 10), torch.zeros(6, 10))
    assert isinstance(losses["policy_loss"], torch.Tensor)
    assert losses["policy_loss"].device == agent.device


def test_001_m4_an_older_file_is_upgraded_by_saving_it_again(tmp_path, monkeypatch):
    path = tmp_path / "agent.safetensors"
    save_agent(make_agent(), path)
    monkeypatch.setattr(saving, "FORMAT_VERSION", 2)
    monkeypatch.setitem(saving.MIGRATIONS, 1, lambda t, m: (t, m | {"version": 2}))
    save_agent(load_agent(path), path)
    monkeypatch.delitem(saving.MIGRATIONS, 1)
    assert saving.agent_state(load_agent(path))[1]["version"] == 2


def test_001_l3_several_epochs_are_allowed_and_kl_is_watched_between_them():
    agent = make_agent(epochs=20, minibatches=2, learning_rate=3e-2, target_kl=0.01)
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert metrics.early_stop_epoch is not None
    assert 0 < metrics.optimizer_steps < 40
    assert metrics.approx_kl_max > 0.015


def test_001_l4_the_worst_ratio_names_its_head():
    agent = make_agent(epochs=1, minibatches=1)
    for name in ("slot", "blend", "op"):
        buffer = filled_buffer(agent)
        index = HEAD_NAMES.index(name)
        relevant = buffer.log_probs[..., index] != 0
        buffer.log_probs[..., index] -= 9e-5 * relevant
        assert agent.update(buffer, shuffle()).ratio_worst_head == name
        agent = make_agent(epochs=1, minibatches=1)


def test_001_l5_updates_are_counted_once_each_even_when_kl_stops_them():
    agent = make_agent(target_kl=1e-9, learning_rate=1e-2)
    for count in (1, 2, 3):
        metrics = agent.update(filled_buffer(agent), shuffle())
        assert agent.update_count == count
    assert metrics.early_stop_epoch is not None


def test_001_kept_weight_decay_is_on_the_critic_only():
    agent = make_agent(weight_decay=0.3)
    groups = make_optimizer(agent.network, agent.config).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    assert decayed == {id(p) for p in agent.network.value_head.parameters()}
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in agent.network.parameters())


def test_001_kept_decay_shrinks_an_idle_critic_and_nothing_else():
    agent = make_agent(weight_decay=0.5, learning_rate=1e-2)
    before = parameters_of(agent)
    for parameter in agent.network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    agent.optimizer.step()
    for name, parameter in parameters_of(agent).items():
        factor = 1 - 0.5 * 1e-2 if name.startswith("value_head") else 1.0
        torch.testing.assert_close(parameter, factor * before[name])


def test_001_kept_the_optimiser_is_fused():
    assert all(group["fused"] for group in make_agent().optimizer.param_groups)


def test_001_kept_policy_loss_is_a_mean_over_relevant_steps():
    """Steps that ignore a head do not dilute what it learns from the others."""
    agent = make_agent()
    batch = filled_buffer(agent, envs=60, steps=1).sequences()
    ops = batch.actions[:, 0, 3]
    wait = (ops == LifecycleOp.WAIT).nonzero().squeeze(1)
    rows = torch.arange(60)
    gradients = []
    for chosen in (rows, torch.cat([rows, wait, wait])):
        agent.network.zero_grad()
        advantages = torch.ones(len(chosen), 1)
        agent._losses(batch.rows(chosen), advantages, torch.zeros_like(advantages))[
            "policy_loss"
        ].backward()
        gradients.append(agent.network.blueprint_head[2].weight.grad.clone())
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
