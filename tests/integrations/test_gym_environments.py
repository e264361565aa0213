"""The environments keep the contracts of Gymnasium, and train hosts like `esper grow`."""

import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3

import esper.gym
from esper.gym.problem import solution
from esper.leyline import ConfigError, LifecycleOp, PackageMissingError
from esper.simic import analytic
from esper.tamiyo.controllers.simple import StaticController
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.run import GrowthSettings, play_run
from esper.tolaria.tasks import find_task

QUICK = replace(find_task("digits"), batches_per_epoch=2)
SETTINGS = {esper.gym.GROWTH: {"task": QUICK, "steps": 4}, esper.gym.ANALYTIC: {}}
BOTH = pytest.mark.parametrize("name", SETTINGS)
KINDS = pytest.mark.parametrize("actions", ["factored", "flat"])
WAIT = [0, 0, 0, int(LifecycleOp.WAIT)]
GERMINATE = [1, 1, 1, int(LifecycleOp.GERMINATE)]


def make(name: str, **more: Any) -> gymnasium.Env:
    return gymnasium.make(name, **SETTINGS[name], **more)


def make_vec(name: str, num_envs: int, **more: Any) -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec(name, num_envs=num_envs, **SETTINGS[name], **more)


def legal_action(env: gymnasium.Env) -> Any:
    mask = env.get_wrapper_attr("action_masks")().astype(np.int8)
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        return env.action_space.sample(mask=mask)
    parts = np.split(mask, np.cumsum(env.action_space.nvec)[:-1])
    return env.action_space.sample(mask=tuple(parts))


def play(env: gymnasium.Env, **reset: Any) -> list[Any]:
    """One episode of legal actions: all that the environment said."""
    said: list[Any] = [env.reset(**reset)]
    over = False
    while not over:
        said.append(env.step(legal_action(env)))
        over = said[-1][2]
    return said


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return np.array_equal(ours, theirs)


@BOTH
@KINDS
@pytest.mark.filterwarnings("error::UserWarning:gymnasium")
def test_the_checkers_of_gymnasium_and_sb3_are_content(name: str, actions: str) -> None:
    check_env(make(name, actions=actions, render_mode="ansi").unwrapped)
    check_env_of_sb3(make(name, actions=actions), warn=True)


@BOTH
def test_equal_seeds_are_equal_environments(name: str) -> None:
    """For several episodes, whatever happens to the global generators in between."""
    first, second = make(name), make(name)
    for env in (first, second):
        env.action_space.seed(5)
    for episode in range(2):
        seed = {"seed": 7} if episode == 0 else {}
        one = play(first, **seed)
        np.random.seed(episode)  # noqa: NPY002
        random.seed(episode)
        two = play(second, **seed)
        assert equal(one, two)
    assert not equal(one[0], first.reset(seed=7))
    assert not equal(first.reset(seed=8), first.reset(seed=7))


@BOTH
def test_a_copy_is_the_environment_that_has_its_seed(name: str) -> None:
    more = {"population": "looped"} if name == esper.gym.GROWTH else {}
    many = make_vec(name, 3, **more)
    alone = [make(name, **more) for _ in range(3)]
    observations, info = many.reset(seed=11)
    for i, env in enumerate(alone):
        observation, own = env.reset(seed=11 + i)
        np.testing.assert_array_equal(observations[i], observation)
        assert info["key"][i] == own["key"]
        np.testing.assert_array_equal(info["action_mask"][i], own["action_mask"])
    for actions in ([WAIT, GERMINATE, WAIT], [GERMINATE, WAIT, WAIT]):
        observations, rewards, _, _, info = many.step(np.array(actions))
        for i, env in enumerate(alone):
            observation, reward, *_, own = env.step(np.array(actions[i]))
            np.testing.assert_array_equal(observations[i], observation)
            assert (rewards[i], info["illegal"][i]) == (reward, own["illegal"])


def test_the_return_is_what_the_score_gained() -> None:
    """Without growth nothing costs anything, and the host is that of `esper grow` with the key."""
    env = make(esper.gym.GROWTH)
    _, info = env.reset(options={"key": 3})
    first = info["val_score"]
    rewards = []
    for _ in range(4):
        _, reward, over, truncated, info = env.step(WAIT)
        rewards.append(reward)
    assert over
    assert not truncated
    assert sum(rewards) == pytest.approx((info["val_score"] - first) / 100, abs=1e-9)
    rules = GrowthSettings(4, keep_best=False, schedule=QUICK.schedule)
    recipe = QUICK.recipe(QUICK.load(data_root()))
    trained = play_run(recipe, [3], rules, StaticController(), task="digits")
    assert trained[0].outcome.val_score == info["val_score"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_hosts_learn_while_the_agent_does_not(mode: Any) -> None:
    said = []
    for context in (nullcontext, mode):
        env = make(esper.gym.GROWTH)
        with context():
            said.append([env.reset(seed=0), env.step(GERMINATE), env.step(WAIT)])
    assert equal(*said)


@BOTH
def test_an_illegal_decision_is_wait_and_is_marked(name: str) -> None:
    one, two = make(name), make(name)
    one.reset(seed=2)
    two.reset(seed=2)
    cull = [0, 0, 0, int(LifecycleOp.CULL)]  # there is nothing to cull
    *illegal, info = one.step(cull)
    *waited, others = two.step(WAIT)
    assert equal(illegal, waited)
    assert info.pop("illegal")
    assert not others.pop("illegal")
    assert equal(info, others)


def test_the_best_policy_gets_the_optimum() -> None:
    keys = list(range(1000))
    envs = make_vec(esper.gym.ANALYTIC, len(keys))
    _, info = envs.reset(options={"keys": keys})
    optimum = solution().optimum
    np.testing.assert_allclose(info["optimal_value"], optimum)
    copies, returns, over = envs.unwrapped._copies, np.zeros(len(keys)), False
    for time in range(analytic.HORIZON):
        rows = solution().act(time, copies.problem.env.states)
        _, rewards, ended, _, info = envs.step(rows)
        assert not info["illegal"].any()
        returns, over = returns + rewards, ended.all()
    assert over
    assert abs(returns.mean() - optimum) < 3 * returns.std() / np.sqrt(len(keys))
    assert returns.std() > 0


@BOTH
def test_the_step_after_the_end_begins_new_episodes(name: str) -> None:
    envs = DictInfoToList(RecordEpisodeStatistics(make_vec(name, 2)))
    first, _ = envs.reset(seed=1)
    ended, steps = np.zeros(2, dtype=bool), 0
    while not ended.any():
        _, _, ended, truncated, infos = envs.step(np.array([WAIT, WAIT]))
        steps += 1
        assert not truncated.any()
    assert ended.all()
    assert [info["episode"]["l"] for info in infos] == [steps, steps]
    again, rewards, ended, _, _ = envs.step(np.array([GERMINATE, GERMINATE]))
    assert not ended.any()
    assert rewards.tolist() == [0.0, 0.0]
    assert not np.array_equal(first, again) or name == esper.gym.ANALYTIC
    assert np.array_equal(envs.reset(seed=1)[0], first)


def test_many_small_hosts_are_fused() -> None:
    assert make_vec(esper.gym.GROWTH, 8).unwrapped._copies.problem.rules.population == "fused"
    looped = make_vec(esper.gym.GROWTH, 8, population="looped").unwrapped
    assert looped._copies.problem.rules.population == "looped"


@BOTH
def test_the_text_names_the_last_action_and_the_stage_of_every_slot(name: str) -> None:
    env = make(name, render_mode="ansi")
    env.reset(seed=0)
    env.step(GERMINATE)
    headline, *slots = env.render().splitlines()
    assert "GERMINATE" in headline
    planted = [": learning" in line or ": planted" in line for line in slots]
    assert planted == [slot == GERMINATE[0] for slot in range(len(slots))]


def test_a_vector_is_seen_copy_by_copy() -> None:
    envs = make_vec(esper.gym.ANALYTIC, 2, render_mode="ansi")
    envs.reset(seed=0)
    envs.step(np.array([WAIT, GERMINATE]))
    assert ["GERMINATE" in frame for frame in envs.render()] == [False, True]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "digit"}, "no task 'digit'; there are digits"),
        ({"actions": "both"}, "actions must be factored or flat, got 'both'"),
        ({"reward": {"param_price": 1.0}}, "no setting reward.param_price; did you mean"),
        ({"incubation": "slow"}, "incubation"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"population": "threads"}, "population must be"),
        ({"render_mode": "human"}, "render_mode must be ansi, got 'human'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render:UserWarning")
def test_bad_settings_are_one_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        gymnasium.make(esper.gym.GROWTH, **settings)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_calls_are_one_sentence() -> None:
    env, envs = make(esper.gym.ANALYTIC).unwrapped, make_vec(esper.gym.ANALYTIC, 2)
    with pytest.raises(ConfigError, match="num_envs must be at least 1, got 0"):
        make_vec(esper.gym.ANALYTIC, 0)
    with pytest.raises(ConfigError, match="call reset before"):
        env.step(WAIT)
    with pytest.raises(ConfigError, match="no option 'keys'; use 'key'"):
        env.reset(options={"keys": 3})
    env.reset(seed=0)
    for action in ([9, 0, 0, 0], [-1, 0, 0, 0], [0, 0, 0], 3, [0.5, 0, 0, 0]):
        with pytest.raises(ConfigError, match=r"is not in MultiDiscrete\(\[2 3 3 4\]\)"):
            env.step(action)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="2 actions, one for each environment"):
        envs.step([WAIT])
    for key in (-1, 1.5, "a", True, 2**70):
        with pytest.raises(ConfigError, match="whole number"):
            env.reset(options={"key": key})
    for wrong in ({"seed": [1, 2, 3]}, {"options": {"keys": [1]}}, {"options": {"keys": 1}}):
        with pytest.raises(ConfigError, match="a list of 2, one for each environment"):
            envs.reset(**wrong)


def test_without_gymnasium_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "esper.gym")
    with pytest.raises(PackageMissingError, match=r"pip install 'esper-grow\[gym\]'"):
        import esper.gym  # noqa: F401


def test_knowing_the_environments_loads_no_torch() -> None:
    code = (
        "import sys, esper.gym, gymnasium; gymnasium.make('esper/AnalyticGrowth-v0').reset();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
