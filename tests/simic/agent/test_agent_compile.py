"""torch.compile: the functions that are called are compiled, agree with eager, and fall back."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import register_backend
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import counters

from agent_support import (
    OBS,
    filled_buffer,
    make_agent,
    parameters_of,
    random_masks,
    shuffle,
)
from esper.leyline import HEAD_NAMES, ConfigError
from esper.simic.agent.advantages import compute_gae
from esper.simic.agent.network import FactoredRecurrentActorCritic
from esper.simic.telemetry.health import GradientThresholds, measure_gradients


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


counter = CompileCounterWithBackend("eager")


@register_backend(name="counting")
def counting(graph, inputs):
    return counter(graph, inputs)


@register_backend(name="broken")
def broken(graph, inputs):
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("counting", "flat"),
        pytest.param("counting", "set", marks=pytest.mark.soak),
        pytest.param("inductor", "flat", marks=pytest.mark.soak),
        pytest.param("inductor", "set", marks=pytest.mark.soak),
    ],
)
def test_compiled_and_uncompiled_agree(backend, kind):
    """'counting' runs the traced graphs without generating code, and counts them."""
    counters.clear()
    start = counter.frame_count
    eager = make_agent(kind=kind, epochs=2, minibatches=2)
    compiled = make_agent(kind=kind, epochs=2, minibatches=2, compile_backend=backend)
    for round_ in range(3):
        buffers = [filled_buffer(agent, envs=6, steps=5, key=round_) for agent in (eager, compiled)]
        torch.testing.assert_close(buffers[0].log_probs, buffers[1].log_probs, rtol=0, atol=1e-5)
        assert torch.equal(buffers[0].actions, buffers[1].actions)
        metrics = [a.update(b, shuffle()) for a, b in zip((eager, compiled), buffers, strict=True)]
        assert metrics[1].optimizer_steps == metrics[0].optimizer_steps > 0
        for name in (*HEAD_NAMES, "value"):
            norms = [found.values[f"{name}_grad_norm"] for found in metrics]
            assert norms[1] == pytest.approx(norms[0], rel=1e-4)
        for name, parameter in parameters_of(eager).items():
            torch.testing.assert_close(parameter, parameters_of(compiled)[name], rtol=0, atol=1e-5)
    assert not counters["graph_break"]
    if backend == "counting":
        # Before the LSTM and after it: for acting, for the check of the replay, for learning.
        assert counter.frame_count - start == 6


@pytest.mark.soak
def test_a_failing_compiler_falls_back_with_a_warning(caplog):
    eager, broken_agent = make_agent(), make_agent(compile_backend="broken")
    with caplog.at_level(logging.WARNING):
        buffer = filled_buffer(broken_agent, envs=2, steps=2)
    assert "'broken' failed for act, running eagerly" in caplog.text
    assert caplog.text.count("failed for act") == 1
    assert torch.equal(buffer.actions, filled_buffer(eager, envs=2, steps=2).actions)


@pytest.mark.soak
def test_an_error_of_ours_is_not_taken_for_a_failing_compiler():
    agent = make_agent(compile_backend="eager")
    masks = random_masks(np.random.default_rng(0), 2)
    masks.op[:] = False
    with pytest.raises(RuntimeError, match="2 of 2 rows have no legal action"):
        agent.act(np.zeros((2, OBS)), agent.initial_hidden(2), masks, None)
    with torch.no_grad():
        agent.network.op_head[-1].bias.fill_(torch.nan)
    masks.op[:] = True
    with pytest.raises(ValueError, match="finite"):
        agent.act(np.zeros((2, OBS)), agent.initial_hidden(2), masks, None)


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
    assert asked == {"backend": "inductor", "dynamic": True, "fullgraph": True}
    assert "failed for score, running eagerly: no compiler here" in caplog.text
    assert metrics.optimizer_steps > 0


def test_004_m22_an_unknown_compiler_is_refused():
    with pytest.raises(ConfigError, match="compile_backend 'nonsense'"):
        make_agent(compile_backend="nonsense")


def test_002_crit2_gradients_are_read_from_the_network_itself():
    agent = make_agent(compile_backend="eager")
    assert type(agent.network) is FactoredRecurrentActorCritic
    assert {id(p) for group in agent.optimizer.param_groups for p in group["params"]} == {
        id(p) for p in agent.network.parameters()
    }


ROWS, OFF = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
LEARNT = nn.Parameter(torch.ones(3))
LEARNT.grad = torch.ones(3)
LIMITS = GradientThresholds(0.1, 10.0)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: compute_gae(ROWS, ROWS, ROWS, OFF, OFF, 0.9, 0.9), id="gae"),
        pytest.param(lambda: measure_gradients([LEARNT], LIMITS), id="gradients"),
    ],
)
def test_000_a5_what_cannot_be_compiled_is_left_out(call):
    """A compiled caller traces what it does itself, here one sum, and nothing of the callee."""
    traced = CompileCounter()

    @torch.compile(backend=traced)
    def caller(x):
        call()
        return x + 1.0

    caller(torch.ones(3))
    assert traced.op_count == 1
