"""A policy that was learnt elsewhere is left alone until the critic has caught up."""

import pytest
import torch

from agent_support import BOTH_KINDS, filled_buffer, make_agent, shuffle
from esper.leyline import ConfigError, constants


@BOTH_KINDS
def test_at_first_only_the_critic_learns_then_everything_does(kind):
    agent = make_agent(kind=kind, critic_first=2, learning_rate=1e-2, target_kl=None)
    start = {name: p.clone() for name, p in agent.network.named_parameters()}
    losses = [agent.update(filled_buffer(agent), shuffle()).values["value_loss"] for _ in range(2)]
    for name, parameter in agent.network.named_parameters():
        assert torch.equal(parameter, start[name]) != name.startswith("value_head"), name
    assert losses[1] < losses[0]
    agent.update(filled_buffer(agent), shuffle())
    for name, parameter in agent.network.named_parameters():
        assert not torch.equal(parameter, start[name]), name


def test_the_critic_is_given_more_passes_while_it_learns_alone():
    agent = make_agent(critic_first=1, epochs=2, minibatches=2)
    steps = [agent.update(filled_buffer(agent), shuffle()).optimizer_steps for _ in range(2)]
    assert steps[0] == 2 * 2 * constants.CRITIC_FIRST_REPEATS
    assert steps[1] <= 2 * 2


def test_a_negative_number_of_updates_is_refused():
    with pytest.raises(ConfigError, match="critic_first must be at least 0"):
        make_agent(critic_first=-1)
