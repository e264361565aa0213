"""The network, apart from learning: shapes, scales, first parameters, and what acting gives."""

import subprocess
import sys
from importlib.metadata import requires

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
    random_masks,
    shuffle,
)
from esper.leyline import HEAD_NAMES, OP, ConfigError
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.rollout import action_draws
from esper.simic.agent.types import MaskTensors


def test_parameter_count_of_the_reviewed_network():
    network = FactoredRecurrentActorCritic(NetworkConfig(80, num_slots=3, num_blueprints=5))
    assert sum(p.numel() for p in network.parameters()) == 185_296


def test_a_sequence_gives_what_single_steps_give():
    network, rng = make_network(), np.random.default_rng(0)
    states = torch.from_numpy(rng.normal(size=(3, 7, OBS))).float()
    masks = [random_masks(rng, 3) for _ in range(7)]
    hidden = network.get_initial_hidden(3)
    actions, log_probs, values = [], [], []
    with torch.no_grad():
        for t in range(7):
            draws = torch.from_numpy(rng.random((3, 4)))
            a, lp, v, hidden = network.get_action(
                states[:, t], hidden, mask_tensors(masks[t]), draws
            )
            actions.append(a)
            log_probs.append(lp)
            values.append(v)
        stacked = MaskTensors(
            *(torch.stack(m, 1) for m in zip(*map(mask_tensors, masks), strict=True))
        )
        whole, entropies, whole_values = network.evaluate_actions(
            states, torch.stack(actions, 1), stacked, network.get_initial_hidden(3)
        )
    torch.testing.assert_close(whole, torch.stack(log_probs, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole_values, torch.stack(values, 1), rtol=1e-4, atol=1e-5)
    assert ((entropies >= 0) & (entropies <= 1 + 1e-6)).all()


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


def test_the_value_path_needs_no_masks_and_agrees_with_acting():
    agent, rng = make_agent(), np.random.default_rng(0)
    states = rng.normal(size=(4, OBS)).astype(np.float32)
    decision = agent.act(states, agent.initial_hidden(4), random_masks(rng, 4), None)
    assert torch.equal(agent.value(states, agent.initial_hidden(4)), decision.values)


def test_004_h4_value_of_the_next_state_needs_no_masks():
    """V(s') is a function of observation and hidden state; stale masks cannot enter it."""
    agent, rng = make_agent(), np.random.default_rng(0)
    states, hidden = rng.normal(size=(5, OBS)).astype(np.float32), agent.initial_hidden(5)
    values = agent.value(states, hidden)
    for _ in range(3):
        decision = agent.act(states, hidden, random_masks(rng, 5), rng.random((5, 4)))
        assert torch.equal(decision.values, values)


def test_d12_the_bootstrap_draws_no_action(monkeypatch):
    agent = make_agent()
    monkeypatch.setattr(agent.network, "decide", lambda *a, **k: pytest.fail("drew an action"))
    values = agent.value(np.zeros((3, OBS), dtype=np.float32), agent.initial_hidden(3))
    assert values.shape == (3,)


def test_without_draws_the_most_probable_legal_action_is_taken():
    agent, rng = make_agent(), np.random.default_rng(0)
    states = rng.normal(size=(50, OBS)).astype(np.float32)
    masks = random_masks(rng, 50)
    hidden = agent.initial_hidden(50)
    greedy = agent.act(states, hidden, masks, None)
    assert masks.allows(greedy.actions).all()
    for key in range(20):
        drawn = agent.act(states, hidden, masks, np.random.default_rng(key).random((50, 4)))
        assert (drawn.log_probs[:, 3] <= greedy.log_probs[:, 3] + 1e-6).all()


def test_an_action_does_not_depend_on_the_neighbours_of_its_environment():
    agent, rng = make_agent(), np.random.default_rng(0)
    states = rng.normal(size=(8, OBS)).astype(np.float32)
    masks = random_masks(rng, 8)
    draws = action_draws(7, 0, 8, 1)[:, 0]
    together = agent.act(states, agent.initial_hidden(8), masks, draws)
    half = type(masks)(masks.op[:4], masks.slot[:4], masks.blueprint[:4], masks.blend[:4])
    apart = agent.act(states[:4], agent.initial_hidden(4), half, action_draws(7, 0, 4, 1)[:, 0])
    np.testing.assert_array_equal(apart.actions, together.actions[:4])


def test_acting_uses_no_global_randomness():
    agent = make_agent()
    torch.manual_seed(0)
    first = filled_buffer(agent).actions.clone()
    torch.manual_seed(1)
    np.random.seed(5)  # noqa: NPY002
    assert torch.equal(filled_buffer(agent).actions, first)


def test_003_kept_acting_leaves_no_graph():
    agent = make_agent()
    masks = random_masks(np.random.default_rng(0), 2)
    decision = agent.act(np.zeros((2, OBS)), agent.initial_hidden(2), masks, None)
    tensors = (decision.log_probs, decision.values, *decision.hidden)
    assert not any(tensor.requires_grad for tensor in tensors)


def test_initial_parameters_are_a_function_of_the_key_and_disturb_nobody():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, same, other = make_network(5), make_network(5), make_network(6)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one.lstm.weight_hh_l0, same.lstm.weight_hh_l0)
    assert not torch.equal(one.lstm.weight_hh_l0, other.lstm.weight_hh_l0)


def test_003_kept_initialisation_is_orthogonal_with_the_usual_gains():
    network = make_network(actor_gain=0.01, feature_dim=32, lstm_hidden_dim=32)

    def gains(weight):
        return torch.linalg.svdvals(weight.detach())

    torch.testing.assert_close(gains(network.feature_net[0].weight), torch.full((7,), 2**0.5))
    torch.testing.assert_close(gains(network.op_head[2].weight), torch.full((4,), 0.01))
    torch.testing.assert_close(gains(network.value_head[2].weight), torch.ones(1))


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


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_004_m9_forget_biases_start_at_one_and_all_others_at_zero(layers):
    network = make_network(lstm_layers=layers)
    biases = [p for name, p in network.lstm.named_parameters() if "bias" in name]
    assert len(biases) == 2 * layers
    for bias in biases:
        i, f, g, o = bias.chunk(4)
        assert (f == 1).all()
        assert (torch.cat([i, g, o]) == 0).all()


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


def test_000_l1_the_feature_net_has_one_layer():
    network = make_network()
    assert sum(isinstance(m, nn.Linear) for m in network.feature_net) == 1


@pytest.mark.parametrize(("hidden", "width"), [(8, 32), (64, 32), (128, 64)])
def test_000_l4_heads_have_a_least_width(hidden, width):
    network = make_network(lstm_hidden_dim=hidden, head_width=None)
    assert network.op_head[0].out_features == width
    assert make_network(head_width=7).op_head[0].out_features == 7


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


def test_003_networks_r4_shared_features_are_layer_normalised():
    features, _ = make_network().encode(
        100 * torch.randn(8, OBS, generator=shuffle()), make_network().get_initial_hidden(8)
    )
    assert features.mean(dim=-1).abs().max() < 1e-5


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


def test_003_networks_h1_without_torch_the_import_fails_and_says_so():
    """No name is None instead; whoever installs the package gets torch with it."""
    script = "import sys; sys.modules['torch'] = None\nimport esper.simic.agent.ppo"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].startswith("ModuleNotFoundError: import of torch")
    assert any(line.startswith("torch") for line in requires("esper-grow"))


@pytest.mark.parametrize(
    "change",
    [
        {"observation_dim": 8},
        {"num_slots": 2},
        {"num_blueprints": 2},
        {"num_blends": 2},
        {"feature_dim": 8},
        {"lstm_hidden_dim": 8},
        {"lstm_layers": 2},
        {"head_width": 8},
        {"actor_gain": 0.5},
        {"critic_gain": 0.5},
    ],
    ids=str,
)
def test_d31_every_size_of_the_network_has_an_effect(change):
    usual, other = (
        {name: p.tolist() for name, p in make_network(**sizes).named_parameters()}
        for sizes in ({}, change)
    )
    assert usual != other
