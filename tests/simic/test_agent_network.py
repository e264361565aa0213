"""The network, the buffer and a round, apart from learning."""

import numpy as np
import pytest
import torch

from agent_support import (
    OBS,
    RandomGrowth,
    filled_buffer,
    make_agent,
    make_network,
    mask_tensors,
    random_masks,
    shuffle,
)
from esper.simic.agent import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.rollout import action_draws, play_round
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


def test_the_value_path_needs_no_masks_and_agrees_with_acting():
    agent, rng = make_agent(), np.random.default_rng(0)
    states = rng.normal(size=(4, OBS)).astype(np.float32)
    decision = agent.act(states, agent.initial_hidden(4), random_masks(rng, 4), None)
    assert torch.equal(agent.value(states, agent.initial_hidden(4)), decision.values)


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


@pytest.mark.parametrize("ends", [0.0, 0.2])
def test_a_round_fills_rows_up_to_the_end_of_their_episode(ends):
    agent = make_agent()
    buffer = agent.new_buffer(8, 12)
    env = RandomGrowth(8, 12, key=4, ends=ends)
    returns = play_round(agent, env, buffer, 0, action_draws(0, 0, 8, 12))
    batch = buffer.sequences()
    last = (batch.valid.sum(dim=1) - 1)[:, None]
    ended = (batch.terminated & batch.valid) | batch.truncated
    assert ended.gather(1, last).all()
    assert (ended.sum(dim=1) == 1).all()
    np.testing.assert_allclose(batch.rewards.sum(dim=1), returns, rtol=1e-5, atol=1e-5)
    assert len(set(buffer.step_counts)) > 1 if ends else (buffer.step_counts == 12).all()


def test_a_buffer_knows_the_hidden_state_that_each_episode_ended_with():
    agent = make_agent()
    buffer = agent.new_buffer(8, 12)
    play_round(agent, RandomGrowth(8, 12, key=4, ends=0.2), buffer, 0, action_draws(0, 0, 8, 12))
    assert len(set(buffer.step_counts)) > 1
    with torch.no_grad():
        for env, length in enumerate(buffer.step_counts):
            seen = buffer.observations[env : env + 1, :length]
            _, replayed = agent.network.encode(seen, agent.initial_hidden(1))
            for last, expected in zip(buffer.last_hidden, replayed, strict=True):
                torch.testing.assert_close(last[:, env], expected[:, 0], rtol=1e-4, atol=1e-5)


def test_a_buffer_can_be_used_again_and_forgets_the_last_round():
    agent = make_agent()
    buffer = filled_buffer(agent, envs=4, steps=12, key=1)
    env = RandomGrowth(4, 3, key=2)
    play_round(agent, env, buffer, 0, action_draws(2, 0, 4, 12))
    fresh = agent.new_buffer(4, 12)
    play_round(agent, env, fresh, 0, action_draws(2, 0, 4, 12))
    for name in ("observations", "actions", "rewards", "values", "valid", "terminated"):
        used, new = (getattr(b.sequences(), name) for b in (buffer, fresh))
        assert torch.equal(used, new), name
    assert len(buffer) == 12


def test_a_cleared_environment_is_not_learnt_from():
    agents = make_agent(minibatches=1), make_agent(minibatches=1)
    buffers = [filled_buffer(agent, envs=4) for agent in agents]
    buffers[0].rewards[2] = 1e6
    for buffer in buffers:
        buffer.clear_env(2)
    metrics = [a.update(b, shuffle()) for a, b in zip(agents, buffers, strict=True)]
    assert metrics[0] == metrics[1]
    assert metrics[0].steps == 30


def test_initial_parameters_are_a_function_of_the_seed_and_disturb_nobody():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, same, other = make_network(5), make_network(5), make_network(6)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one.lstm.weight_hh_l0, same.lstm.weight_hh_l0)
    assert not torch.equal(one.lstm.weight_hh_l0, other.lstm.weight_hh_l0)
