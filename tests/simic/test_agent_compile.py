"""torch.compile: the functions that are called are compiled, agree with eager, and fall back."""

import logging

import numpy as np
import pytest
import torch
from torch._dynamo.backends.registry import register_backend
from torch._dynamo.testing import CompileCounterWithBackend

from agent_support import OBS, filled_buffer, make_agent, parameters_of, random_masks, shuffle


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


@pytest.mark.parametrize("backend", ["counting", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_and_uncompiled_agree(backend):
    """'counting' runs the traced graphs without generating code, and counts them."""
    start = counter.frame_count
    eager, compiled = make_agent(), make_agent(compile_backend=backend)
    buffers = [filled_buffer(agent, envs=4, steps=5) for agent in (eager, compiled)]
    torch.testing.assert_close(buffers[0].log_probs, buffers[1].log_probs, rtol=0, atol=1e-5)
    assert torch.equal(buffers[0].actions, buffers[1].actions)
    acted = counter.frame_count
    metrics = [a.update(b, shuffle()) for a, b in zip((eager, compiled), buffers, strict=True)]
    assert metrics[1].optimizer_steps == metrics[0].optimizer_steps > 0
    for name, norm in metrics[0].head_grad_norms.items():
        assert metrics[1].head_grad_norms[name] == pytest.approx(norm, rel=1e-4)
    for name, parameter in parameters_of(eager).items():
        torch.testing.assert_close(parameter, parameters_of(compiled)[name], rtol=0, atol=1e-5)
    if backend == "counting":
        assert start < acted < counter.frame_count


def test_a_failing_compiler_falls_back_with_a_warning(caplog):
    eager, broken_agent = make_agent(), make_agent(compile_backend="broken")
    with caplog.at_level(logging.WARNING):
        buffer = filled_buffer(broken_agent, envs=2, steps=2)
    assert "'broken' failed for get_action, running eagerly" in caplog.text
    assert caplog.text.count("failed for get_action") == 1
    assert torch.equal(buffer.actions, filled_buffer(eager, envs=2, steps=2).actions)


def test_an_error_of_ours_is_not_taken_for_a_failing_compiler():
    agent = make_agent(compile_backend="eager")
    masks = random_masks(np.random.default_rng(0), 2)
    masks.op[:] = False
    with pytest.raises(RuntimeError, match="no legal action"):
        agent.act(np.zeros((2, OBS)), agent.initial_hidden(2), masks, None)
