"""Saving and loading an agent."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from agent_support import filled_buffer, make_agent, parameters_of, shuffle
from esper.leyline import ConfigError
from esper.simic.agent import saving
from esper.simic.agent.saving import agent_from_state, agent_state, load_agent, save_agent


def trained_agent():
    agent = make_agent(
        key=3, learning_rate=1e-2, entropy_coef_per_head={"slot": 2.0}, weight_decay=0.01
    )
    agent.update(filled_buffer(agent), shuffle())
    return agent


def rewrite(path, change):
    """Change the header of a saved agent in place."""
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["esper_agent"])
    change(meta)
    save_file(load_file(path), path, metadata={"esper_agent": json.dumps(meta)})


def test_a_loaded_agent_acts_and_learns_on_exactly_as_the_saved_one(tmp_path):
    agent = trained_agent()
    save_agent(agent, tmp_path / "deep" / "agent.safetensors")
    loaded = load_agent(tmp_path / "deep" / "agent.safetensors")
    assert loaded.config == agent.config
    assert loaded.network.config == agent.network.config
    assert loaded.update_count == agent.update_count == 1
    for _ in range(2):
        buffers = [filled_buffer(a, key=5) for a in (agent, loaded)]
        assert torch.equal(buffers[0].actions, buffers[1].actions)
        first, second = (
            a.update(b, shuffle(1)) for a, b in zip((agent, loaded), buffers, strict=True)
        )
        assert first == second
    for name, parameter in parameters_of(agent).items():
        assert torch.equal(parameter, parameters_of(loaded)[name]), name


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    agent = trained_agent()
    save_agent(agent, tmp_path / "agent.safetensors")
    agent.update(filled_buffer(agent), shuffle())
    save_agent(agent, tmp_path / "agent.safetensors")
    assert load_agent(tmp_path / "agent.safetensors").update_count == 2
    assert [p.name for p in tmp_path.iterdir()] == ["agent.safetensors"]


def test_a_newer_format_is_refused(tmp_path):
    path = tmp_path / "agent.safetensors"
    save_agent(trained_agent(), path)
    rewrite(path, lambda meta: meta.update(version=saving.FORMAT_VERSION + 1))
    with pytest.raises(ConfigError, match="use a newer version of esper"):
        load_agent(path)


def test_an_older_format_is_migrated_and_saved_in_the_new_one(tmp_path, monkeypatch):
    path, agent = tmp_path / "agent.safetensors", trained_agent()
    save_agent(agent, path)

    def renamed(tensors, meta):
        """What a next format might do: a setting gets another default."""
        return tensors, meta | {"version": 2, "ppo": meta["ppo"] | {"clip_ratio": 0.1}}

    monkeypatch.setattr(saving, "FORMAT_VERSION", 2)
    monkeypatch.setitem(saving.MIGRATIONS, 1, renamed)
    loaded = load_agent(path)
    assert loaded.config == replace(agent.config, clip_ratio=0.1)
    assert agent_state(loaded)[1]["version"] == 2
    save_agent(loaded, path)
    monkeypatch.delitem(saving.MIGRATIONS, 1)
    assert load_agent(path).config == loaded.config


def test_every_older_format_has_a_way_forward():
    assert set(saving.MIGRATIONS) == set(range(1, saving.FORMAT_VERSION))


@pytest.mark.parametrize("version", [None, 0, "1"])
def test_a_file_without_a_known_version_is_refused(tmp_path, version):
    path = tmp_path / "agent.safetensors"
    save_agent(trained_agent(), path)
    rewrite(path, lambda meta: meta.update(version=version))
    with pytest.raises(ConfigError, match="its version is"):
        load_agent(path)


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


def test_an_agent_for_another_problem_is_refused(tmp_path):
    path, agent = tmp_path / "agent.safetensors", trained_agent()
    save_agent(agent, path)
    with pytest.raises(ConfigError, match="has num_slots 3, this run has 4"):
        load_agent(path, expected=replace(agent.network.config, num_slots=4))
    load_agent(path, expected=replace(agent.network.config, lstm_hidden_dim=999))


def test_a_pickle_is_refused_and_never_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was executed",))

    path = tmp_path / "agent.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match="not a safetensors file"):
        load_agent(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match="not an agent"):
        load_agent(path)
