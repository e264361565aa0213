"""Before the first step every ratio is 1; a learner that sees something else is caught."""

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
)
from esper.leyline import HEAD_NAMES
from esper.simic.agent.ppo import ReplayMismatchError
from esper.simic.agent.rollout import action_draws
from esper.simic.control.normalization import RunningMeanStd


@BOTH_KINDS
@pytest.mark.parametrize(("envs", "steps", "layers"), [(6, 10, 1), (2, 150, 1), (3, 20, 2)])
def test_ratios_are_one_before_the_first_step(envs, steps, layers, kind):
    agent = make_agent(network={"lstm_layers": layers}, kind=kind)
    metrics = agent.update(filled_buffer(agent, envs, steps, ends=0.02), shuffle())
    assert metrics.values["replay_error"] < 1e-5
    assert metrics.optimizer_steps > 0


def untouched_after_mismatch(agent, buffer, match):
    before = parameters_of(agent)
    with pytest.raises(ReplayMismatchError, match=match):
        agent.update(buffer, shuffle())
    for name, parameter in parameters_of(agent).items():
        assert torch.equal(parameter, before[name]), name


@BOTH_KINDS
def test_a_learner_that_forgets_a_mask_is_caught(kind):
    agent = make_agent(kind=kind)
    buffer = filled_buffer(agent)
    buffer.masks.op.fill_(True)
    untouched_after_mismatch(agent, buffer, "op head")


@BOTH_KINDS
def test_a_learner_that_uses_the_slot_mask_of_another_op_is_caught(kind):
    agent = make_agent(kind=kind)
    buffer = filled_buffer(agent)
    buffer.masks.slot.copy_(buffer.masks.slot.any(dim=2, keepdim=True).expand_as(buffer.masks.slot))
    untouched_after_mismatch(agent, buffer, "slot head")


@BOTH_KINDS
def test_a_stale_hidden_state_is_caught(kind):
    agent = make_agent(kind=kind)
    buffer = filled_buffer(agent)
    # In one environment only, as if a reset had been forgotten there.
    buffer.hidden[0][:, 4] = 0.5
    untouched_after_mismatch(agent, buffer, "head is off")


@BOTH_KINDS
def test_parameters_that_changed_since_acting_are_caught(kind):
    agent = make_agent(kind=kind)
    buffer = filled_buffer(agent)
    with torch.no_grad():
        agent.network.op_head[2].bias[0] += 0.1
    untouched_after_mismatch(agent, buffer, "op head")


def round_with_normalizer(agent, store_normalized_again: bool):
    """A round whose observations are normalised by statistics that move at every step."""
    env, steps = RandomGrowth(4, 8), 8
    normalizer = RunningMeanStd((OBS,), epsilon=1e-12)
    buffer, hidden = agent.new_buffer(4, steps), agent.initial_hidden(4)
    buffer.start(hidden)
    raw, masks = env.reset(0)
    draws = action_draws(0, 0, 4, steps)
    raws = []
    for step in range(steps):
        raw_tensor = torch.from_numpy(3.0 * raw + 5.0)
        normalizer.update(raw_tensor)
        seen = normalizer.normalize(raw_tensor)
        raws.append(raw_tensor)
        decision = agent.act(seen, hidden, masks, draws[:, step])
        hidden, offered = decision.hidden, masks
        raw, masks, rewards, terminated, truncated = env.step(decision.actions)
        buffer.add(seen, offered, decision, rewards, terminated, truncated, np.zeros(4))
    if store_normalized_again:
        for step, raw_tensor in enumerate(raws):
            buffer.observations[:, step] = normalizer.normalize(raw_tensor)
    return buffer, normalizer, raws


def test_004_c5_statistics_include_the_batch_and_the_ratio_is_still_one():
    agent = make_agent()
    buffer, normalizer, raws = round_with_normalizer(agent, False)
    np.testing.assert_allclose(normalizer.mean, torch.cat(raws).double().mean(0), atol=1e-9)
    assert agent.update(buffer, shuffle()).values["replay_error"] < 1e-5


def test_a_normaliser_that_moved_between_acting_and_learning_is_caught():
    agent = make_agent()
    buffer, _, _ = round_with_normalizer(agent, True)
    untouched_after_mismatch(agent, buffer, "head is off")


@BOTH_KINDS
def test_after_one_update_every_head_has_had_a_gradient(kind):
    agent = make_agent(kind=kind)
    before = parameters_of(agent)
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert all(metrics.values[f"{name}_grad_norm"] > 0 for name in (*HEAD_NAMES, "value"))
    for name, parameter in parameters_of(agent).items():
        assert not torch.equal(parameter, before[name]), name


def test_old_log_probs_are_the_stored_ones():
    """Moving the stored log-probs within the tolerance moves the ratio by exactly that."""
    agent = make_agent(epochs=1, minibatches=1)
    buffer = filled_buffer(agent)
    buffer.log_probs[..., 3] -= 5e-5
    metrics = agent.update(buffer, shuffle())
    assert metrics.values["replay_error"] == pytest.approx(5e-5, rel=0.05)
    assert metrics.values["ratio_max"] == pytest.approx(1 + 5e-5, abs=3e-6)
