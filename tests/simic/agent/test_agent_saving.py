"""The state of an agent, taken and put back; files are the checkpoint's business."""

import gc
import json
import weakref

import pytest
import torch

from agent_support import BOTH_KINDS, filled_buffer, make_agent, parameters_of, shuffle
from esper.leyline import ConfigError
from esper.simic.training.state import agent_from_state, agent_state


def trained_agent(kind="flat"):
    agent = make_agent(
        kind=kind, key=3, learning_rate=1e-2, entropy_coef_per_head={"slot": 2.0}, weight_decay=0.01
    )
    agent.update(filled_buffer(agent), shuffle())
    return agent


@BOTH_KINDS
def test_an_agent_from_its_state_acts_and_learns_on_exactly_as_the_one_it_was_taken_of(kind):
    agent = trained_agent(kind)
    tensors, meta = agent_state(agent)
    copy = agent_from_state(tensors, json.loads(json.dumps(meta)))
    assert copy.config == agent.config
    assert copy.network.config == agent.network.config
    assert copy.update_count == agent.update_count == 1
    for _ in range(2):
        buffers = [filled_buffer(a, key=5) for a in (agent, copy)]
        assert torch.equal(buffers[0].actions, buffers[1].actions)
        first, second = (
            a.update(b, shuffle(1)) for a, b in zip((agent, copy), buffers, strict=True)
        )
        assert first == second
    for name, parameter in parameters_of(agent).items():
        assert torch.equal(parameter, parameters_of(copy)[name]), name


def test_004_m6_nothing_of_the_file_survives_loading():
    tensors, meta = agent_state(trained_agent())
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    alive = [weakref.ref(tensor) for tensor in tensors.values()]
    loaded = agent_from_state(tensors, meta)
    del tensors
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]
    assert loaded.update_count == 1
    assert loaded.optimizer.state


def test_shapes_that_do_not_match_are_named():
    tensors, meta = agent_state(trained_agent())
    meta["network"]["num_slots"] = 4
    with pytest.raises(ConfigError, match=r"saved slot_head.2.weight is \[3, 16\].*\[4, 16\]"):
        agent_from_state(tensors, meta)


def test_missing_parameters_are_named():
    tensors, meta = agent_state(trained_agent())
    del tensors["network.lstm_norm.bias"]
    with pytest.raises(ConfigError, match=r"lstm_norm\.bias"):
        agent_from_state(tensors, meta)
