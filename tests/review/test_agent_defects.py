"""Known defects that concern the agent, one test each."""

import ast
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from agent_support import OBS, filled_buffer, make_agent, random_masks, shuffle
from esper.leyline import OP, LifecycleOp
from esper.simic import agent as agent_package
from esper.simic.agent import NetworkConfig, PPOConfig
from esper.simic.agent.advantages import compute_gae
from esper.simic.control import RunningMeanStd


def test_d12_the_bootstrap_draws_no_action(monkeypatch):
    agent = make_agent()
    monkeypatch.setattr(agent.network, "decide", lambda *a, **k: pytest.fail("drew an action"))
    values = agent.value(np.zeros((3, OBS), dtype=np.float32), agent.initial_hidden(3))
    assert values.shape == (3,)


def test_d13_the_function_that_is_called_is_the_compiled_one(monkeypatch):
    counter, compile_ = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, backend, dynamic: compile_(f, backend=counter, dynamic=dynamic)
    )
    torch._dynamo.reset()
    agent = make_agent(compile_backend="eager")
    masks = random_masks(np.random.default_rng(0), 2)
    agent.act(np.zeros((2, OBS)), agent.initial_hidden(2), masks, None)
    torch._dynamo.reset()
    assert counter.frame_count > 0


def test_d14_the_policy_acts_and_learns_in_single_precision():
    agent = make_agent()
    buffer = filled_buffer(agent)
    agent.update(buffer, shuffle())
    assert buffer.log_probs.dtype == buffer.values.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in agent.network.parameters())


def test_d16_entropy_is_a_mean_not_a_sum_over_heads():
    agent = make_agent(network={"actor_gain": 1e-6})
    batch = filled_buffer(agent, envs=40).sequences()
    _, entropies, _ = agent.network.evaluate_actions(
        batch.observations, batch.actions, batch.masks, batch.hidden
    )
    relevant = torch.zeros_like(entropies, dtype=torch.bool)
    for op, row in enumerate(agent_relevance()):
        relevant[batch.actions[..., OP] == op] = row
    expected = (entropies.sum() / relevant.sum()).item()
    metrics = agent.update(filled_buffer(agent, envs=40), shuffle())
    assert metrics.entropy == pytest.approx(expected, abs=0.02)
    assert metrics.entropy <= 1.0


def agent_relevance():
    """The causal table, written out."""
    return torch.tensor(
        [
            [False, False, False, True],
            [True, True, True, True],
            [True, False, False, True],
            [True, False, False, True],
        ]
    )


def test_d17_entropy_of_a_head_is_over_its_steps_and_extremes_are_true_ones():
    agent = make_agent(epochs=4, minibatches=1, target_kl=None, learning_rate=1e-2)
    buffer = filled_buffer(agent)
    seen, losses = [], agent._losses
    agent._losses = lambda *args: seen.append(losses(*args)) or seen[-1]
    metrics = agent.update(buffer, shuffle())
    assert metrics.ratio_max == max(s["ratio_max"].max().item() for s in seen)
    assert metrics.ratio_min == min(s["ratio_min"].min().item() for s in seen)
    germinate = (buffer.actions[..., OP] == LifecycleOp.GERMINATE).sum().item()
    assert all(s["head_counts"][1].item() == germinate for s in seen)
    means = [s["head_entropies"][1].item() for s in seen]
    assert metrics.head_entropies["blueprint"] == pytest.approx(np.mean(means), rel=1e-5)


def test_d17_a_head_that_was_never_drawn_has_no_entropy():
    agent = make_agent()
    with torch.no_grad():
        agent.network.op_head[2].bias[LifecycleOp.WAIT] = 1e3
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert metrics.head_entropies["slot"] is None
    assert metrics.head_entropies["op"] == pytest.approx(0.0, abs=1e-6)


def test_d22_a_forgetting_normaliser_does_not_saturate_at_the_start():
    running = RunningMeanStd((2,), momentum=0.99)
    rng = np.random.default_rng(0)
    for _ in range(5):
        batch = torch.from_numpy(rng.normal([1e5, -40.0], [1e3, 2.0], size=(16, 2)))
        running.update(batch)
        assert running.normalize(batch).abs().max() < 5.0


def test_d31_every_setting_of_the_agent_is_read():
    """Checks of a setting do not count as use of it."""
    read = set()
    for path in Path(agent_package.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                node.body = [n for n in node.body if getattr(n, "name", "") != "__post_init__"]
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for config in (PPOConfig, NetworkConfig):
        assert {field.name for field in fields(config)} <= read


def test_d33_a_truncation_in_the_middle_of_a_row_uses_its_own_bootstrap():
    """The two-step probe: nothing but the reward is worth anything, so A0 is the reward's."""
    zeros = torch.zeros(1, 2)
    advantages, _ = compute_gae(
        rewards=torch.tensor([[0.0, 3.0]]),
        values=zeros,
        bootstrap_values=torch.tensor([[1.0, 0.0]]),
        terminated=torch.tensor([[False, True]]),
        truncated=torch.tensor([[True, False]]),
        gamma=0.995,
        lam=0.97,
    )
    assert advantages[0].tolist() == pytest.approx([0.995, 3.0])
