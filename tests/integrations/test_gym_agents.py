"""Agents of other libraries learn from the growth environment: a little of it, on real hosts."""

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor
from torch import nn

import esper.gym
import gym_torchrl
from esper.tolaria.tasks import find_task

pytestmark = pytest.mark.heavy
SETTINGS = {"task": replace(find_task("digits"), batches_per_epoch=1), "steps": 6}
EPISODE = SETTINGS["steps"]


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


class Counts(gymnasium.Wrapper):
    """Counts illegal decisions and what was planted."""

    illegal = planted = 0

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.illegal += result[-1]["illegal"]
        self.planted = max(self.planted, result[-1]["params"])
        return result


@pytest.mark.parametrize(
    ("kind", "policy", "actions"),
    [
        (MaskablePPO, "MlpPolicy", "flat"),
        (MaskablePPO, "MlpPolicy", "factored"),
        (RecurrentPPO, "MlpLstmPolicy", "factored"),
    ],
)
def test_agents_of_sb3_learn(kind: Any, policy: str, actions: str) -> None:
    env = Counts(gymnasium.make(esper.gym.GROWTH, actions=actions, **SETTINGS))
    envs = VecMonitor(DummyVecEnv([lambda: env]))
    model = kind(policy, envs, n_steps=EPISODE, batch_size=EPISODE, n_epochs=1, seed=0)
    before = weights(model.policy)
    model.learn(3 * EPISODE)
    assert not torch.equal(before, weights(model.policy))
    assert [episode["l"] for episode in model.ep_info_buffer] == [EPISODE] * 3
    assert env.planted > 496  # an agent at birth plants something, and it is charged
    if actions == "flat":
        assert env.illegal == 0
    elif kind is RecurrentPPO:
        assert env.illegal > 0


def test_torchrl_reads_masks_and_learns() -> None:
    torch.manual_seed(0)
    env = gym_torchrl.environment(esper.gym.GROWTH, **SETTINGS)
    env.set_seed(0)
    learner = gym_torchrl.Learner(env.observation_spec["observation"].shape[0], env.action_spec.n)
    with torch.no_grad():
        batch = torch.stack([env.rollout(100, learner.actor) for _ in range(2)])
    assert batch.shape == (2, EPISODE)
    chosen = batch["action_mask"].gather(-1, batch["action"][..., None])
    assert chosen.all()
    assert not batch["action_mask"].all()
    best = batch["logits"].masked_fill(~batch["action_mask"], -torch.inf).argmax(-1)
    assert (batch["action"] != best).any()  # it explores
    before = weights(learner.loss)
    learner.update(batch)
    assert not torch.equal(before, weights(learner.loss))


def test_masks_of_a_vector_are_those_of_its_copies() -> None:
    """What MaskablePPO stacks from single environments is what a native vector says at once."""
    alone = [gymnasium.make(esper.gym.GROWTH, **SETTINGS) for _ in range(2)]
    together = gymnasium.make_vec(esper.gym.GROWTH, num_envs=2, **SETTINGS)
    together.reset(seed=4)
    for seed, env in enumerate(alone, start=4):
        env.reset(seed=seed)
    stacked = np.stack([env.get_wrapper_attr("action_masks")() for env in alone])
    np.testing.assert_array_equal(together.unwrapped.action_masks(), stacked)
