"""Review 003 (the older core): what its findings ask of today's agent, one test each."""

import subprocess
import sys
from collections import Counter
from importlib.metadata import requires

import numpy as np
import pytest
import torch

from agent_support import OBS, filled_buffer, make_agent, make_network, random_masks, shuffle
from esper.leyline import ConfigError
from esper.simic.agent import TamiyoRolloutBuffer
from esper.simic.agent.advantages import compute_gae
from esper.simic.agent.saving import load_agent


def test_003_ppo_m1_the_batch_is_fetched_once_and_never_moved_again(monkeypatch):
    agent = make_agent(epochs=5, minibatches=3, target_kl=None)
    buffer = filled_buffer(agent, envs=6, steps=10)
    fetched, sequences = [], buffer.sequences
    moved, to = [0], torch.Tensor.to

    def spy(self, target):
        if isinstance(target, torch.device):
            moved.append(self.numel())
        return to(self, target)

    monkeypatch.setattr(buffer, "sequences", lambda: fetched.append(1) or sequences())
    monkeypatch.setattr(torch.Tensor, "to", spy)
    agent.update(buffer, shuffle())
    assert len(fetched) == 1
    # Orders of environments and the table of relevant heads; anything about steps has 60 or more.
    assert max(moved) <= 16


def test_003_ppo_m2_a_file_with_an_arbitrary_object_is_rejected(tmp_path):
    path = tmp_path / "agent.pt"
    torch.save({"object": Counter()}, path)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        load_agent(path)


def test_003_ppo_r4_the_update_stops_at_one_and_a_half_times_the_target():
    agent = make_agent(epochs=30, minibatches=1, learning_rate=1e-2, target_kl=0.015)
    metrics = agent.update(filled_buffer(agent), shuffle())
    assert metrics.early_stop_epoch is not None
    assert metrics.approx_kl_max > 1.5 * 0.015
    assert metrics.optimizer_steps == metrics.early_stop_epoch


def test_003_networks_h1_without_torch_the_import_fails_and_says_so():
    """No name is None instead; whoever installs the package gets torch with it."""
    script = "import sys; sys.modules['torch'] = None\nimport esper.simic.agent"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].startswith("ModuleNotFoundError: import of torch")
    assert any(line.startswith("torch") for line in requires("esper-grow"))


def test_003_networks_r4_shared_features_are_layer_normalised():
    features, _ = make_network().encode(
        100 * torch.randn(8, OBS, generator=shuffle()), make_network().get_initial_hidden(8)
    )
    assert features.mean(dim=-1).abs().max() < 1e-5


def test_003_buffers_m1_storage_is_allocated_once_and_indexed(monkeypatch):
    agent = make_agent()
    buffer = agent.new_buffer(6, 10)
    places = {n: t.data_ptr() for n, t in vars(buffer).items() if isinstance(t, torch.Tensor)}
    from agent_support import RandomGrowth
    from esper.simic.agent.rollout import action_draws, play_round

    for episode in range(2):
        play_round(agent, RandomGrowth(6, 10), buffer, episode, action_draws(0, episode, 6, 10))
    assert "observations" in places
    for name, place in places.items():
        assert getattr(buffer, name).data_ptr() == place, name
    monkeypatch.setattr(torch, "stack", lambda *a, **k: pytest.fail("stacked single steps"))
    assert buffer.sequences().rows(torch.tensor([4, 1])).observations.shape == (2, 10, OBS)


def test_003_buffers_l1_everything_is_made_on_the_device_of_the_buffer():
    """'meta' stands in for an accelerator: it is another device wherever the tests run."""
    buffer = TamiyoRolloutBuffer(6, 10, make_network().config, device="meta")
    rooms = [t for t in vars(buffer).values() if isinstance(t, torch.Tensor)]
    assert len(rooms) == 8
    assert all(t.is_meta for t in (*rooms, *buffer.masks, *buffer.hidden))
    advantages, returns = compute_gae(
        buffer.rewards,
        buffer.values,
        buffer.bootstrap_values,
        buffer.terminated,
        buffer.truncated,
        0.99,
        0.95,
    )
    assert advantages.is_meta
    assert returns.is_meta


def test_003_buffers_m2_one_permutation_per_epoch(monkeypatch):
    agent = make_agent(epochs=3, minibatches=2, target_kl=None)
    buffer = filled_buffer(agent)
    drawn, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: drawn.append(a) or randperm(*a, **k))
    agent.update(buffer, shuffle())
    assert drawn == [(6,)] * 3


def test_003_buffers_r3_adding_past_the_capacity_raises():
    agent = make_agent()
    buffer = agent.new_buffer(1, 1)
    buffer.start(agent.initial_hidden(1))
    masks = random_masks(np.random.default_rng(0), 1)
    states, off = np.zeros((1, OBS)), np.zeros(1, dtype=bool)
    decision = agent.act(states, agent.initial_hidden(1), masks, None)
    buffer.add(states, masks, decision, np.zeros(1), off, off, np.zeros(1))
    with pytest.raises(RuntimeError, match="all this buffer holds"):
        buffer.add(states, masks, decision, np.zeros(1), off, off, np.zeros(1))


def test_003_kept_initialisation_is_orthogonal_with_the_usual_gains():
    network = make_network(actor_gain=0.01, feature_dim=32, lstm_hidden_dim=32)

    def gains(weight):
        return torch.linalg.svdvals(weight.detach())

    torch.testing.assert_close(gains(network.feature_net[0].weight), torch.full((7,), 2**0.5))
    torch.testing.assert_close(gains(network.op_head[2].weight), torch.full((4,), 0.01))
    torch.testing.assert_close(gains(network.value_head[2].weight), torch.ones(1))


def test_003_kept_acting_leaves_no_graph():
    agent = make_agent()
    masks = random_masks(np.random.default_rng(0), 2)
    decision = agent.act(np.zeros((2, OBS)), agent.initial_hidden(2), masks, None)
    tensors = (decision.log_probs, decision.values, *decision.hidden)
    assert not any(tensor.requires_grad for tensor in tensors)


def test_003_kept_optimiser_settings():
    group = make_agent().optimizer.param_groups[0]
    assert group["eps"] == 1e-5
    assert make_agent().config.max_grad_norm == 0.5
