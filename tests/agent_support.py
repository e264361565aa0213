"""Small agents, random legal masks and random episodes, for every test of the agent."""

import numpy as np
import pytest
import torch

from esper.leyline import ActionMasks, LifecycleOp, generator
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import TamiyoRolloutBuffer, action_draws, play_round
from esper.simic.agent.set_network import new_network
from esper.simic.agent.types import MaskTensors
from esper.tamiyo.policy.set_features import FITS, PRESENT, SetLayout

OBS, SLOTS, BLUEPRINTS = 7, 3, 5


BOTH_KINDS = pytest.mark.parametrize("kind", ["flat", "set"])


def width_of(kind: str) -> int:
    return OBS if kind == "flat" else SetLayout(SLOTS, BLUEPRINTS).size


def as_observations(noise: np.ndarray, kind: str, slots: int, blueprints: int) -> np.ndarray:
    """Noise [..., D]; for a network over sets all slots are present, and candidates fit or not."""
    observations = noise.astype(np.float32)
    if kind == "set":
        parts = SetLayout(slots, blueprints).split(torch.from_numpy(observations))
        parts[1][..., PRESENT] = 1.0
        fits = (parts[2][..., FITS] > 0).float()
        parts[2][..., FITS] = 1.0
        parts[2].mul_(fits.unsqueeze(-1))
    return observations


def make_network(
    key: int = 0, kind: str = "flat", **changes: object
) -> FactoredRecurrentActorCritic:
    settings = {
        "observation_dim": width_of(kind),
        "kind": kind,
        "embedding_dim": 8,
        "num_slots": SLOTS,
        "num_blueprints": BLUEPRINTS,
        "feature_dim": 16,
        "lstm_hidden_dim": 16,
        "actor_gain": 1.0,
        "head_width": 16,
    }
    return new_network(NetworkConfig(**(settings | changes)), key)


def make_agent(
    key: int = 0,
    network: dict | None = None,
    kind: str = "flat",
    minibatches: int | None = 4,
    **config: object,
) -> PPOAgent:
    config["minibatches"] = minibatches
    return PPOAgent(make_network(key, kind, **(network or {})), PPOConfig(**config))


def random_masks(
    rng: np.random.Generator, envs: int, slots: int = SLOTS, blueprints: int = BLUEPRINTS
) -> ActionMasks:
    """Legal but arbitrary: rows of heads that no legal op makes relevant may be empty."""
    slot = rng.random((envs, 4, slots)) < 0.5
    slot[:, LifecycleOp.WAIT] = True
    blueprint = rng.random((envs, slots, blueprints)) < 0.5
    blueprint[..., 0] |= slot[:, LifecycleOp.GERMINATE] & ~blueprint.any(axis=-1)
    blend = rng.random((envs, 3)) < 0.5
    blend[:, 0] |= slot[:, LifecycleOp.GERMINATE].any(axis=-1) & ~blend.any(axis=-1)
    return ActionMasks(slot.any(axis=-1), slot, blueprint, blend)


def mask_tensors(masks: ActionMasks) -> MaskTensors:
    return MaskTensors.of(masks)


class RandomGrowth:
    """Noise for observations, masks and rewards; episodes end at random or at `steps`."""

    def __init__(
        self,
        num_envs: int,
        steps: int,
        key: int = 0,
        ends: float = 0.0,
        obs: int = OBS,
        slots: int = SLOTS,
        blueprints: int = BLUEPRINTS,
        kind: str = "flat",
    ) -> None:
        self.num_envs, self.steps, self.key, self.ends = num_envs, steps, key, ends
        self.obs, self.slots, self.blueprints, self.kind = obs, slots, blueprints, kind
        self.groups = np.arange(num_envs)

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        self.rng = generator(self.key, "random-growth", round_)
        self.time = 0
        return self._observe()

    def step(self, actions: np.ndarray) -> tuple:
        assert self.masks.allows(actions).all()
        self.time += 1
        rewards = self.rng.normal(size=self.num_envs).astype(np.float32)
        terminated = self.rng.random(self.num_envs) < self.ends
        truncated = ~terminated & (self.rng.random(self.num_envs) < self.ends)
        truncated |= ~terminated & (self.time == self.steps)
        return *self._observe(), rewards, terminated, truncated

    def _observe(self) -> tuple[np.ndarray, ActionMasks]:
        self.masks = random_masks(self.rng, self.num_envs, self.slots, self.blueprints)
        noise = self.rng.normal(size=(self.num_envs, self.obs))
        return as_observations(noise, self.kind, self.slots, self.blueprints), self.masks


def filled_buffer(
    agent: PPOAgent, envs: int = 6, steps: int = 10, key: int = 0, ends: float = 0.0
) -> TamiyoRolloutBuffer:
    """A buffer with one random episode per environment, acted by `agent`."""
    config = agent.network.config
    env = RandomGrowth(
        envs,
        steps,
        key,
        ends,
        config.observation_dim,
        config.num_slots,
        config.num_blueprints,
        config.kind,
    )
    buffer = agent.new_buffer(envs, steps)
    play_round(agent, env, buffer, 0, action_draws(key, 0, envs, steps))
    return buffer


def shuffle(key: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(key)


def parameters_of(agent: PPOAgent) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in agent.network.named_parameters()}
