"""The rollout buffer: whole episodes in arrays that are allocated once."""

import numpy as np
import pytest
import torch

from agent_support import (
    OBS,
    RandomGrowth,
    filled_buffer,
    make_agent,
    make_network,
    parameters_of,
    random_masks,
    shuffle,
)
from esper.leyline import ConfigError
from esper.simic.agent.advantages import compute_gae
from esper.simic.agent.rollout import TamiyoRolloutBuffer, action_draws, play_round


def test_003_buffers_m1_storage_is_allocated_once_and_indexed(monkeypatch):
    agent = make_agent()
    buffer = agent.new_buffer(6, 10)
    places = {n: t.data_ptr() for n, t in vars(buffer).items() if isinstance(t, torch.Tensor)}
    for round_ in range(2):
        play_round(agent, RandomGrowth(6, 10), buffer, round_, action_draws(0, round_, 6, 10))
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


def test_000_m4_an_update_depends_on_the_first_hidden_state_only():
    """Of hidden states two are stored per environment; the last is there to be looked at."""
    agents = make_agent(), make_agent()
    buffers = [filled_buffer(agent, envs=4, steps=10) for agent in agents]
    assert sum(part.numel() for part in (*buffers[0].hidden, *buffers[0].last_hidden)) == 4 * 4 * 16
    for part in buffers[1].last_hidden:
        part.fill_(torch.nan)
    first, second = (a.update(b, shuffle()) for a, b in zip(agents, buffers, strict=True))
    assert first == second
    for name, parameter in parameters_of(agents[0]).items():
        assert torch.equal(parameter, parameters_of(agents[1])[name]), name


def test_a_round_starts_from_the_hidden_state_that_the_buffer_is_given():
    """The update replays from it, so an agent that acted from it finds every ratio at 1."""
    agent, env = make_agent(), RandomGrowth(4, 6)
    buffer = agent.new_buffer(4, 6)
    hidden = tuple(torch.randn(1, 4, 16, generator=shuffle(key)) for key in (0, 1))
    given = [part.clone() for part in hidden]
    buffer.start(hidden)
    seen, masks = env.reset(0)
    for draws in action_draws(0, 0, 4, 6).swapaxes(0, 1):
        decision = agent.act(seen, hidden, masks, draws)
        after, offered, *ends = env.step(decision.actions)
        buffer.add(seen, masks, decision, *ends, np.zeros(4))
        seen, masks, hidden = after, offered, decision.hidden
    for own, first in zip(buffer.hidden, given, strict=True):
        assert torch.equal(own, first)
    assert agent.update(buffer, shuffle()).values["replay_error"] < 1e-5


def test_000_a3_hidden_states_round_trip_through_the_buffer():
    agent = make_agent(network={"lstm_layers": 2})
    buffer = filled_buffer(agent, envs=5)
    hidden = tuple(torch.randn(2, 5, 16, generator=shuffle(key)) for key in (0, 1))
    for own, given in zip(buffer.hidden, hidden, strict=True):
        own.copy_(given)
    rows = torch.tensor([3, 0])
    batch = buffer.sequences().rows(rows)
    for replayed, given in zip(batch.hidden, hidden, strict=True):
        assert torch.equal(replayed, given[:, rows])


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


def acting(agent, observations, masks=None, envs=4):
    masks = masks or random_masks(np.random.default_rng(0), envs)
    return agent.act(observations, agent.initial_hidden(envs), masks, None)


def one_step(agent, buffer, terminated, active=None, observations=None):
    envs = buffer.num_envs
    seen = np.zeros((envs, OBS), dtype=np.float32) if observations is None else observations
    masks = random_masks(np.random.default_rng(0), envs)
    decision = acting(agent, np.zeros((envs, OBS), dtype=np.float32), masks, envs)
    off = np.zeros(envs, dtype=bool)
    buffer.add(seen, masks, decision, np.ones(envs), terminated, off, np.zeros(envs), active)


def test_a_row_takes_one_episode_only():
    agent = make_agent()
    buffer = agent.new_buffer(2, 5)
    buffer.start(agent.initial_hidden(2))
    one_step(agent, buffer, np.array([True, False]))
    with pytest.raises(RuntimeError, match="episode of environment 0 is over"):
        one_step(agent, buffer, np.array([False, False]))
    one_step(agent, buffer, np.array([False, True]), active=np.array([False, True]))
    assert buffer.step_counts.tolist() == [1, 2]
    assert len(buffer) == 3


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


def test_an_episode_without_an_end_is_refused():
    agent = make_agent()
    buffer = agent.new_buffer(2, 5)
    buffer.start(agent.initial_hidden(2))
    one_step(agent, buffer, np.array([True, False]))
    with pytest.raises(RuntimeError, match="environment 1 has not ended"):
        agent.update(buffer, shuffle())


def test_a_buffer_stores_no_nan():
    agent = make_agent()
    buffer = agent.new_buffer(2, 5)
    buffer.start(agent.initial_hidden(2))
    observations = np.full((2, OBS), np.nan)
    with pytest.raises(ValueError, match="finite"):
        one_step(agent, buffer, np.array([True, True]), observations=observations)
    assert len(buffer) == 0


def test_a_buffer_refuses_arrays_of_other_sizes():
    agent = make_agent()
    buffer = agent.new_buffer(2, 5)
    with pytest.raises(ConfigError, match="hidden state for this buffer"):
        buffer.start(agent.initial_hidden(3))
    with pytest.raises(ConfigError, match=rf"\[2, {OBS}\] here, got \[2, {OBS + 2}\]"):
        one_step(agent, buffer, np.array([True, True]), observations=np.zeros((2, OBS + 2)))


@pytest.mark.parametrize("change", [{"num_slots": 4}, {"lstm_hidden_dim": 8}])
def test_000_a4_a_buffer_of_other_sizes_is_refused(change):
    agent = make_agent()
    other = TamiyoRolloutBuffer(2, 3, make_network(**change).config)
    with pytest.raises(ConfigError, match="buffer was made for"):
        agent.update(other, shuffle())


@pytest.mark.parametrize(("envs", "steps"), [(0, 5), (5, 0)])
def test_a_buffer_without_room_is_refused(envs, steps):
    with pytest.raises(ConfigError, match="at least one"):
        make_agent().new_buffer(envs, steps)
