"""Bad input: a clear error, or a skipped and reported update; parameters never become NaN."""

import json
import logging

import numpy as np
import pytest
import torch

from agent_support import OBS, filled_buffer, make_agent, parameters_of, random_masks, shuffle
from esper.leyline import ConfigError, InvalidStateMachineError
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import NetworkConfig


def acting(agent, observations, masks=None, envs=4):
    masks = masks or random_masks(np.random.default_rng(0), envs)
    return agent.act(observations, agent.initial_hidden(envs), masks, None)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_non_finite_observation_is_named(poison):
    observations = np.zeros((4, OBS), dtype=np.float32)
    observations[2, 5] = poison
    with pytest.raises(ValueError, match="environment 2, column 5"):
        acting(make_agent(), observations)


def test_a_wrong_width_is_named():
    with pytest.raises(ConfigError, match=rf"\[batch, {OBS}\].*got \[4, {OBS + 1}\]"):
        acting(make_agent(), np.zeros((4, OBS + 1), dtype=np.float32))


def test_a_wrong_hidden_state_is_named():
    agent = make_agent()
    masks = random_masks(np.random.default_rng(0), 4)
    with pytest.raises(ConfigError, match="hidden state must be two arrays"):
        agent.act(np.zeros((4, OBS), dtype=np.float32), agent.initial_hidden(3), masks, None)


def test_masks_for_another_number_of_slots_are_refused():
    masks = random_masks(np.random.default_rng(0), 4, slots=2)
    with pytest.raises((ValueError, RuntimeError)):
        acting(make_agent(), np.zeros((4, OBS), dtype=np.float32), masks)


def test_an_environment_without_a_legal_op_is_refused():
    masks = random_masks(np.random.default_rng(0), 4)
    masks.op[1] = False
    with pytest.raises(InvalidStateMachineError, match="1 of 4 rows"):
        acting(make_agent(), np.zeros((4, OBS), dtype=np.float32), masks)


def test_an_update_on_an_empty_buffer_is_skipped_and_reported():
    agent = make_agent()
    before = parameters_of(agent)
    metrics = agent.update(agent.new_buffer(4, 10), shuffle())
    assert metrics.skipped == "the buffer is empty"
    assert metrics.steps == metrics.optimizer_steps == 0
    assert agent.update_count == 0
    assert all(torch.equal(p, before[n]) for n, p in parameters_of(agent).items())


@pytest.mark.parametrize(
    ("field", "poison"),
    [("rewards", torch.nan), ("rewards", torch.inf), ("values", torch.nan)],
)
def test_a_non_finite_update_is_skipped_and_reported(field, poison, caplog):
    agent = make_agent()
    buffer = filled_buffer(agent)
    getattr(buffer, field)[1, 3] = poison
    before = parameters_of(agent)
    with caplog.at_level(logging.WARNING):
        metrics = agent.update(buffer, shuffle())
    assert metrics.optimizer_steps == 0
    assert "is " in metrics.skipped
    json.dumps(metrics.flat(), allow_nan=False)
    assert metrics.skipped in caplog.text
    assert all(torch.equal(p, before[n]) for n, p in parameters_of(agent).items())
    healthy = agent.update(filled_buffer(agent), shuffle())
    assert healthy.skipped is None
    assert all(p.isfinite().all() for p in parameters_of(agent).values())


def test_a_non_finite_gradient_is_skipped_and_reported(monkeypatch):
    agent = make_agent()
    buffer = filled_buffer(agent)
    before = parameters_of(agent)
    # A loss that is finite while its gradient is not: the root of zero.
    losses = agent._losses

    def poisoned(*args):
        terms = losses(*args)
        zero = sum(p.sum() for p in agent.network.parameters()) * 0.0
        return terms | {"policy_loss": terms["policy_loss"] + torch.sqrt(zero)}

    monkeypatch.setattr(agent, "_losses", poisoned)
    metrics = agent.update(buffer, shuffle())
    assert metrics.optimizer_steps == 0
    assert metrics.skipped == "grad_norm is nan"
    assert all(torch.equal(p, before[n]) for n, p in parameters_of(agent).items())


def test_a_loss_that_overflows_ends_the_update_with_finite_parameters():
    """Only the minibatch with the huge return overflows; earlier ones were sound steps."""
    agent = make_agent()
    buffer = filled_buffer(agent)
    buffer.rewards[1, 3] = 1e30
    metrics = agent.update(buffer, shuffle())
    assert metrics.skipped == "value_loss is inf"
    assert metrics.optimizer_steps < agent.config.epochs * agent.config.minibatches
    assert all(p.isfinite().all() for p in parameters_of(agent).values())


def test_huge_finite_inputs_leave_finite_parameters():
    agent = make_agent()
    buffer = filled_buffer(agent)
    buffer.rewards *= 1e12
    metrics = agent.update(buffer, shuffle())
    assert metrics.optimizer_steps > 0
    assert all(p.isfinite().all() for p in parameters_of(agent).values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": 0.0},
        {"gamma": 1.5},
        {"epochs": 0},
        {"minibatches": 1.5},
        {"clip_ratio": -0.1},
        {"target_kl": 0.0},
        {"value_loss": "l1"},
        {"entropy_coef": 0.0},
        {"entropy_coef_per_head": {"opp": 1.0}},
        {"value_clip": -1.0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        PPOConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"lstm_layers": 0}, {"num_slots": 0}, {"num_ops": 3}, {"actor_gain": 0.0}, {"head_width": 0}],
    ids=str,
)
def test_sizes_that_cannot_work_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=name.removesuffix("_gain")):
        NetworkConfig(**({"observation_dim": 4, "num_slots": 2, "num_blueprints": 2} | wrong))
