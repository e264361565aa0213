"""A learned policy is a controller like any other, for the networks that it was made for."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import BLUEPRINT, OP, ConfigError, LifecycleOp
from esper.simic.training.checkpoint import load_state
from esper.simic.training.env_specs import Space
from esper.simic.training.policy_controller import LearnedController
from esper.simic.training.state import new_state
from esper.tamiyo.controllers.heuristic import HeuristicController
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import GrowthEnv, play
from helpers import episode_settings
from training_support import tiny_config, tiny_run, tiny_task


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "run"
    tiny_run(folder, rounds=1)
    return folder


@pytest.fixture(scope="module")
def set_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "set"
    tiny_run(folder, rounds=1, **{"network.kind": "set"})
    return folder


def actions_of(controller, keys, catalogue=None) -> np.ndarray:
    task, taken = tiny_task(), []
    env = GrowthEnv(
        LoopedPopulation(task.recipe(task.load(None), catalogue or default_catalogue()), keys),
        episode_settings(task.steps),
    )
    play(env, controller, on_step=lambda transition: taken.append(transition.actions))
    return np.stack(taken, axis=1)


def test_it_repeats_itself_and_does_not_mind_its_neighbours(run):
    together = actions_of(esper.load_policy(run), [1, 2])
    assert np.array_equal(together, actions_of(esper.load_policy(run), [1, 2]))
    assert np.array_equal(together[1:], actions_of(esper.load_policy(run), [2]))


def test_it_can_draw_as_a_function_of_the_key(run):
    drawn = esper.load_policy(run, deterministic=False)
    first = actions_of(drawn, [1, 2])
    assert np.array_equal(first, actions_of(drawn, [1, 2]))
    assert not np.array_equal(first, actions_of(esper.load_policy(run), [1, 2]))


@pytest.mark.parametrize("most", [1, None])
def test_it_plants_no_more_seeds_than_it_has_learnt_with(most):
    task, config = tiny_task(), tiny_config(max_seeds=most)
    state = new_state(config, Space.of(len(task.slots), default_catalogue().names))
    env = GrowthEnv(
        LoopedPopulation(task.recipe(task.load(None)), list(range(6))),
        episode_settings(task.steps),
    )
    held = []
    controller = LearnedController(state, deterministic=False)
    play(env, controller, on_step=lambda _: held.append(env.table.holds_seed.sum(axis=1).max()))
    assert max(held) == (most or len(task.slots))


def test_a_single_checkpoint_can_be_loaded(run):
    policy = esper.load_policy(run / "checkpoints" / "round-000000")
    assert policy.agent.update_count == 0


def model_and_data():
    task = tiny_task()
    data = task.load(None)
    loaders = [
        DataLoader(TensorDataset(x, y), batch_size=32)
        for x, y in ((data.train_x, data.train_y), (data.val_x, data.val_y))
    ]
    return task.build(), *loaders


def test_a_model_of_the_users_own_grows_with_it(run):
    model, train, val = model_and_data()
    grown = esper.grow(
        model, train, val, slots=["blocks.0", "blocks.1"], controller=str(run), steps=3
    )
    assert isinstance(grown.model, nn.Module)
    assert grown.outcome.controller == str(run)


def test_another_number_of_slots_is_refused_before_training(run):
    model, train, val = model_and_data()
    with pytest.raises(ConfigError, match="decides for 2 slots, this network has 1"):
        esper.grow(model, train, val, slots=["blocks.0"], controller=str(run), steps=3)


def test_other_blueprints_are_refused(run):
    fewer = esper.BlueprintCatalogue(default_catalogue().specs[:3])
    with pytest.raises(ConfigError, match="was trained with the blueprints"):
        esper.load_policy(run).check_fit(2, fewer)


def test_a_folder_without_a_policy_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        esper.load_policy(tmp_path)


def test_other_controllers_are_still_found_by_name():
    from esper.api import find_controller

    assert isinstance(find_controller("heuristic"), HeuristicController)


def test_a_policy_over_sets_repeats_itself_and_does_not_mind_its_neighbours(set_run):
    together = actions_of(esper.load_policy(set_run), [1, 2])
    assert np.array_equal(together, actions_of(esper.load_policy(set_run), [1, 2]))
    assert np.array_equal(together[1:], actions_of(esper.load_policy(set_run), [2]))


def test_a_policy_over_sets_takes_any_slots_and_blueprints(set_run):
    model, train, val = model_and_data()
    grown = esper.grow(model, train, val, slots=["blocks.0"], controller=str(set_run), steps=2)
    assert grown.outcome.controller == str(set_run)
    drawn = esper.load_policy(set_run, deterministic=False)
    every = actions_of(drawn, [1, 2])
    # What does not fit a slot here is no candidate, so that nothing changes without it.
    specs = default_catalogue().specs
    fitting = [spec for spec in specs if "cnn" in spec.factories]
    named = actions_of(drawn, [1, 2], esper.BlueprintCatalogue(tuple(fitting)))
    assert drawn.space.blueprints == tuple(spec.name for spec in fitting)
    planted = every[..., 3] == LifecycleOp.GERMINATE
    assert np.array_equal(every[..., [0, 2, 3]], named[..., [0, 2, 3]])
    assert [specs[i].name for i in every[planted][:, 1]] == [
        fitting[i].name for i in named[planted][:, 1]
    ]
    assert planted.any()


def test_a_policy_over_sets_says_what_it_saw(set_run):
    policy = esper.load_policy(set_run)
    taken = actions_of(policy, [1])
    (told,) = policy.reasons(taken[:, -1])
    assert set(told.blocks) <= {name for name, _ in policy.space.names(["blocks.0", "blocks.1"])}
    assert len(policy.space.names(["blocks.0", "blocks.1"])) == policy.space.observation_dim


def test_a_policy_over_sets_can_be_the_start_for_other_slots(set_run):
    warm = load_state(set_run)
    space = Space.of(5, default_catalogue().names[:7], "set")
    config = tiny_config(**{"network.kind": "set"})
    state = new_state(config, space, warm)
    for name, parameter in state.agent.network.named_parameters():
        assert torch.equal(parameter, warm.agent.network.get_parameter(name))
    flat = Space.of(2, default_catalogue().names)
    with pytest.raises(ConfigError, match="the policy to start from is for 2 slots"):
        new_state(tiny_config(), flat, warm)


def test_a_policy_over_sets_plants_what_it_has_learnt_with_where_that_fits():
    def state(*names):
        config = tiny_config(**{"network.kind": "set", "network.op_bias": {"GERMINATE": 9.0}})
        return new_state(config, Space.of(2, names, "set"))

    planted = {}
    for names in (("conv_light", "branch"), ("mlp", "lora")):
        policy = LearnedController(state(*names), deterministic=False)
        actions = actions_of(policy, range(8))
        chosen = actions[actions[..., OP] == LifecycleOp.GERMINATE][:, BLUEPRINT]
        planted[names] = {default_catalogue().names[each] for each in chosen.tolist()}
    assert planted["conv_light", "branch"] == {"conv_light", "branch"}
    assert len(planted["mlp", "lora"]) > 2, "neither fits here, so that any may be planted"
