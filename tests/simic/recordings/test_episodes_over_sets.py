"""Recorded episodes, imitation and offline learning for a network over sets."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import ConfigError
from esper.simic.recordings.episodes import (
    Episodes,
    convert_episodes,
    join,
    load_episodes,
    record_episodes,
    save_episodes,
)
from esper.simic.recordings.imitation import CloningConfig, EpisodeTensors, clone
from esper.simic.recordings.offline import OfflineConfig, learn_offline
from esper.simic.training.config import load_config
from esper.simic.training.env_specs import Space
from esper.simic.training.state import new_state
from esper.tamiyo.controllers.scripted import ScriptedController
from helpers import small_digits

TEACHER = ScriptedController("2 GERMINATE r0c1 branch linear\n4 CULL r0c1\n", "two")


@cache
def recorded(network: str = "set") -> Episodes:
    task, data = small_digits(96)
    config = load_config(None, {"growth.steps": 5, "network.kind": network})
    return record_episodes(config, task, data, TEACHER, episodes=4)


def state():
    sizes = {"network.kind": "set", "network.feature_dim": 16, "network.lstm_hidden_dim": 16}
    return new_state(load_config(None, sizes), recorded().space)


def test_they_are_the_episodes_of_a_flat_network_seen_otherwise(tmp_path: Path) -> None:
    seen, flat = recorded(), recorded("flat")
    assert seen.space == Space.of(3, default_catalogue().names, "set")
    for name in ("actions", "rewards", "slot_masks", "blueprint_masks", "lengths"):
        assert np.array_equal(getattr(seen, name), getattr(flat, name)), name
    assert np.abs(seen.observations).max() <= 2.0
    with pytest.raises(ConfigError, match="of different kinds"):
        join([seen, flat])
    save_episodes(tmp_path, seen)
    loaded = load_episodes(tmp_path)
    assert loaded.space == seen.space
    assert np.array_equal(loaded.observations, seen.observations)


def test_a_clone_does_what_its_teacher_did() -> None:
    pupil = state()
    config = CloningConfig(epochs=60, learning_rate=1e-2)
    report = clone(pupil.agent.network, pupil.observations, recorded(), config)
    assert report.loss < 0.5 * report.first_loss
    assert report.held_out.acting == 1.0


def test_offline_learning_is_a_function_of_its_key_and_scales_nothing() -> None:
    config = OfflineConfig(steps=20, policy=CloningConfig(epochs=2))
    pupils = [state() for _ in range(2)]
    for pupil in pupils:
        learn_offline(pupil.agent.network, pupil.observations, recorded(), config, key=1)
    first, second = (pupil.agent.network.state_dict() for pupil in pupils)
    assert all(torch.equal(first[name], second[name]) for name in first)
    values = torch.rand(2, recorded().space.observation_dim)
    assert torch.equal(pupils[0].observations.normalize(values), values)
    assert not torch.equal(first["op_head.2.weight"], state().agent.network.op_head[2].weight)


def test_a_file_that_names_another_kind_is_refused(tmp_path: Path) -> None:
    odd = replace(recorded(), space=replace(recorded().space, kind="graph"))
    save_episodes(tmp_path, odd)
    with pytest.raises(ConfigError, match="flat or set, got 'graph'"):
        load_episodes(tmp_path)


def wider(space: Space) -> Space:
    """With two more slots, a blueprint more, and all of them in another order."""
    return Space.of(space.num_slots + 2, ("another", *reversed(space.blueprints)), "set")


def test_a_policy_thinks_the_same_of_episodes_that_are_convert_episodes_a_wider_space() -> None:
    pupil, own = state(), recorded()
    wide = convert_episodes(own, wider(own.space))
    fitted = pupil.agent.network.fitted(wide.space.num_slots, len(wide.space.blueprints))

    def thoughts(network, episodes: Episodes) -> torch.Tensor:
        lesson = EpisodeTensors.of(episodes, pupil.observations)
        with torch.no_grad():
            log_probs, _, values = network.evaluate_actions(
                lesson.observations,
                lesson.actions,
                lesson.masks,
                pupil.agent.initial_hidden(len(own)),
            )
        return torch.stack([log_probs.sum(-1), values])

    assert torch.allclose(thoughts(pupil.agent.network, own), thoughts(fitted, wide), atol=1e-5)
    names = [own.space.blueprints[n] for n in own.actions[:, 1, 1]]
    assert names == [wide.space.blueprints[n] for n in wide.actions[:, 1, 1]] == ["branch"] * 4
    assert (wide.actions[:, 0, 1] == 0).all(), "where nothing is planted no blueprint is meant"


def test_episodes_of_several_kinds_of_hosts_are_learnt_from_together() -> None:
    own = recorded()
    with pytest.raises(ConfigError, match=r"2 slots and .* episodes \(3 slots"):
        convert_episodes(own, Space.of(2, own.space.blueprints, "set"))
    with pytest.raises(ConfigError, match="other slots or blueprints"):
        convert_episodes(recorded("flat"), wider(own.space))
    wide = convert_episodes(own, wider(own.space))
    both = join([wide, convert_episodes(own, wide.space)])
    assert np.array_equal(both.returns, np.tile(own.returns, 2))
