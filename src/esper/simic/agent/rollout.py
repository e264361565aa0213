"""A round of rollouts: one episode in each environment, stored in the buffer."""

from typing import Protocol

import numpy as np
import torch

from esper.leyline import HEAD_NAMES, ActionMasks, generator
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer

# Observations, masks, rewards, terminated, truncated, each for all environments.
Step = tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]


class VectorEnv(Protocol):
    """E environments that step together; steps after the end of an episode are ignored.

    Environments with the same number in `groups` int[E] begin with the same host and use the same
    data in the same order: they differ only in their actions.
    """

    num_envs: int
    groups: np.ndarray

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]: ...

    def step(self, actions: np.ndarray) -> Step: ...


def action_draws(key: int, round_: int, num_envs: int, steps: int) -> np.ndarray:
    """Uniform numbers [E, steps, heads], a function of (key, round, environment)."""
    shape = (steps, len(HEAD_NAMES))
    return np.stack(
        [generator(key, "action", round_, env).random(shape) for env in range(num_envs)]
    )


def play_round(
    agent: PPOAgent,
    env: VectorEnv,
    buffer: TamiyoRolloutBuffer,
    round_: int,
    draws: np.ndarray | None,
) -> np.ndarray:
    """Fill `buffer` with one episode per environment; returns the sums of rewards [E].

    An episode that reaches the last step of the buffer is truncated there. Without `draws` the
    most probable actions are taken.
    """
    observations, masks = env.reset(round_)
    hidden = agent.initial_hidden(env.num_envs)
    buffer.start(hidden, env.groups)
    running = np.ones(env.num_envs, dtype=bool)
    returns = np.zeros(env.num_envs)
    no_value = torch.zeros(env.num_envs)
    for step in range(buffer.max_steps):
        uniforms = None if draws is None else draws[:, step]
        decision = agent.act(observations, hidden, masks, uniforms)
        before, hidden = (observations, masks), decision.hidden
        observations, masks, rewards, terminated, truncated = env.step(decision.actions)
        truncated = truncated | (~terminated & (step == buffer.max_steps - 1))
        bootstrap = agent.value(observations, hidden) if truncated.any() else no_value
        buffer.add(*before, decision, rewards, terminated, truncated, bootstrap, running)
        returns += rewards * running
        running &= ~(terminated | truncated)
        if not running.any():
            break
    return returns
