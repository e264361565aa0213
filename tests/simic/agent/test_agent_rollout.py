"""A round: one episode in each environment."""

import numpy as np
import pytest
import torch

from agent_support import (
    RandomGrowth,
    make_agent,
)
from esper.simic.agent.rollout import action_draws, play_round


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


def test_a_truncated_episode_is_bootstrapped_from_the_state_after_its_last_step():
    agent, env = make_agent(), RandomGrowth(8, 12, key=4, ends=0.2)
    buffer, after = agent.new_buffer(8, 12), []
    step = env.step
    env.step = lambda actions: after.append(step(actions)) or after[-1]
    play_round(agent, env, buffer, 0, action_draws(0, 0, 8, 12))
    truncated = buffer.sequences().truncated.nonzero().tolist()
    assert len({time for _, time in truncated}) > 1
    for row, time in truncated:
        seen = torch.cat(
            [buffer.observations[row, : time + 1], torch.tensor(after[time][0][[row]])]
        )
        with torch.no_grad():
            before, value = agent.network.value(seen[None], agent.initial_hidden(1))[0, -2:]
        assert buffer.bootstrap_values[row, time].item() == pytest.approx(value.item(), abs=1e-5)
        assert abs(value - before) > 1e-3


def test_an_episode_that_reaches_the_last_step_of_the_buffer_is_truncated_there():
    agent = make_agent()
    buffer = agent.new_buffer(4, 5)
    play_round(agent, RandomGrowth(4, 99), buffer, 0, action_draws(0, 0, 4, 5))
    assert buffer.truncated[:, 4].all()
    assert (buffer.bootstrap_values[:, 4] != 0).all()
