"""Review 002 (agent, PyTorch): its findings, one test each."""

import inspect

import numpy as np
import pytest
import torch

from agent_support import (
    OBS,
    filled_buffer,
    make_agent,
    make_network,
    mask_tensors,
    random_masks,
    shuffle,
)
from esper.leyline import HEAD_NAMES, ConfigError, SlotConfig
from esper.simic.agent import FactoredRecurrentActorCritic, NetworkConfig, rollout_buffer
from esper.simic.agent.advantages import (
    compute_gae,
    compute_per_head_advantages,
    normalize_advantages,
)
from esper.simic.agent.types import MaskTensors


@pytest.mark.parametrize("steps", [0, 1])
def test_002_crit1_normalising_none_or_one_step_stays_finite(steps):
    advantages = torch.full((3, 4), 5.0)
    valid = torch.zeros(3, 4, dtype=torch.bool)
    valid.view(-1)[:steps] = True
    normalized = normalize_advantages(advantages, valid)
    assert (normalized == 0).all()


def test_002_crit1_an_update_on_one_step_stays_finite():
    agent = make_agent()
    metrics = agent.update(filled_buffer(agent, envs=1, steps=1), shuffle())
    assert metrics.skipped is None
    assert all(p.isfinite().all() for p in agent.network.parameters())


def test_002_crit2_gradients_are_read_from_the_network_itself():
    agent = make_agent(compile_backend="eager")
    assert type(agent.network) is FactoredRecurrentActorCritic
    assert {id(p) for group in agent.optimizer.param_groups for p in group["params"]} == {
        id(p) for p in agent.network.parameters()
    }


def test_002_high1_nothing_in_the_agent_reads_a_clock():
    from esper.simic.agent import network, optimization, ppo

    for module in (network, optimization, ppo, rollout_buffer):
        assert "import time" not in inspect.getsource(module)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_002_high2_layers_of_the_lstm_are_the_configured_ones(layers):
    network = make_network(lstm_layers=layers)
    assert network.lstm.num_layers == layers
    hidden = network.get_initial_hidden(5)
    assert all(part.shape == (layers, 5, 16) for part in hidden)
    _, after = network.encode(torch.zeros(5, OBS), hidden)
    assert all(part.shape == (layers, 5, 16) for part in after)


@pytest.mark.parametrize("layers", [0, -1, 1.0, True])
def test_002_high2_a_number_of_layers_that_cannot_be_is_refused(layers):
    with pytest.raises(ConfigError, match="lstm_layers"):
        NetworkConfig(4, 2, 2, lstm_layers=layers)


def test_002_high3_the_coefficient_of_a_head_is_the_product_of_both():
    """entropy_coef 0.2 with 3 for the slot head acts as 0.6 on it and 0.2 on the others."""
    weighted = make_agent(
        entropy_coef=0.2, entropy_coef_per_head={"slot": 3.0}, epochs=1, minibatches=1
    )
    batch = filled_buffer(weighted, envs=40, steps=1).sequences()
    zeros = torch.zeros(40, 1)
    terms = weighted._losses(batch, zeros, zeros)
    by_hand = sum(
        (3.0 if name == "slot" else 1.0) * entropy
        for name, entropy in zip(HEAD_NAMES, terms["head_entropies"].tolist(), strict=True)
    )
    assert terms["entropy_bonus"].item() == pytest.approx(by_hand, rel=1e-5)
    assert weighted.get_entropy_coef() == 0.2


def test_002_med2_both_layer_norms_are_there_and_explained():
    network = make_network()
    assert isinstance(network.feature_net[1], torch.nn.LayerNorm)
    assert isinstance(network.lstm_norm, torch.nn.LayerNorm)
    assert "first LayerNorm" in network.__doc__
    assert "second" in network.__doc__


def test_002_med3_credit_of_the_op_is_not_a_copy():
    advantages = torch.ones(5)
    assert compute_per_head_advantages(advantages, torch.ones(5).long())["op"] is advantages


def test_002_med4_the_order_of_gates_is_the_one_of_pytorch():
    """An open forget gate and closed everything else: the cell state keeps sigmoid(2) of itself."""
    network = make_network()
    with torch.no_grad():
        for name, parameter in network.lstm.named_parameters():
            if "weight" in name:
                parameter.zero_()
        cell = torch.ones(1, 1, 16)
        _, (_, after) = network.lstm(torch.zeros(1, 1, 16), (torch.zeros(1, 1, 16), cell))
    torch.testing.assert_close(after, torch.full_like(after, torch.tensor(2.0).sigmoid().item()))


def test_002_med5_the_default_slots_are_shared():
    assert SlotConfig.default() is SlotConfig.default()


def test_002_low1_heads_are_handled_together():
    """Ratios, entropies and advantages of all heads are one array [steps, heads]."""
    agent = make_agent()
    batch = filled_buffer(agent).sequences()
    log_probs, entropies, _ = agent.network.evaluate_actions(
        batch.observations, batch.actions, batch.masks, batch.hidden
    )
    assert log_probs.shape == entropies.shape == (6, 10, len(HEAD_NAMES))


def test_002_low3_gae_is_kept_out_of_compilation():
    assert compute_gae._torchdynamo_disable


def test_002_low5_a_step_is_a_sequence_of_one():
    network, rng = make_network(), np.random.default_rng(0)
    states = torch.from_numpy(rng.normal(size=(4, OBS))).float()
    masks, draws = mask_tensors(random_masks(rng, 4)), torch.from_numpy(rng.random((4, 4)))
    hidden = network.get_initial_hidden(4)
    flat = network.get_action(states, hidden, masks, draws)
    long = network.get_action(
        states[:, None], hidden, MaskTensors(*(m[:, None] for m in masks)), draws[:, None]
    )
    for one, other in zip(flat[:3], long[:3], strict=True):
        assert torch.equal(one, other.squeeze(1))
    for one, other in zip(flat[3], long[3], strict=True):
        assert torch.equal(one, other)
