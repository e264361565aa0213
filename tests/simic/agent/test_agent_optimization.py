"""The optimizer's groups and decay, and the clipping of gradients."""

import pytest
import torch

from agent_support import (
    BOTH_KINDS,
    filled_buffer,
    make_agent,
    make_network,
    parameters_of,
    shuffle,
)
from esper.simic.agent.optimization import clip_gradients, make_optimizer


def test_003_kept_optimizer_settings():
    group = make_agent().optimizer.param_groups[0]
    assert group["eps"] == 1e-5
    assert make_agent().config.max_grad_norm == 0.5


def test_001_kept_the_optimizer_is_fused():
    assert all(group["fused"] for group in make_agent().optimizer.param_groups)


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


@BOTH_KINDS
def test_004_m19_a_huge_critic_gradient_leaves_the_actor_alone_when_clipped_apart(kind):
    network = make_network(kind=kind)
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


def test_the_norm_of_groups_that_are_clipped_apart_is_that_of_all():
    network = make_network()
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert clip_gradients(network, 0.5, separately=True).item() == pytest.approx(count**0.5)
