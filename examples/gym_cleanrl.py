"""PPO on a growth environment in a single file, in the style of CleanRL.

    python examples/gym_cleanrl.py
    python examples/gym_cleanrl.py --env-id esper/Growth-v0 --num-envs 16 --total-steps 9600

Flat actions have an exact mask, so the agent chooses only legal actions. All episodes of a vector
have equal length: a rollout is one episode of each environment, and nothing is bootstrapped.
"""

import argparse
from dataclasses import dataclass, fields
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import esper.gym


@dataclass
class Args:
    env_id: str = esper.gym.ANALYTIC
    num_envs: int = 32
    total_steps: int = 65_536
    seed: int = 0
    learning_rate: float = 2e-3
    gamma: float = 1.0
    gae_lambda: float = 0.95
    epochs: int = 4
    minibatches: int = 4
    clip: float = 0.2
    entropy: float = 0.02
    value: float = 0.5
    max_grad_norm: float = 0.5
    width: int = 64


class Agent(nn.Module):
    def __init__(self, inputs: int, actions: int, width: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                *(nn.Linear(inputs, width), nn.Tanh()),
                *(nn.Linear(width, width), nn.Tanh()),
                nn.Linear(width, outputs),
            )
            for outputs in (actions, 1)
        )

    def policy(self, seen: torch.Tensor, mask: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(seen).masked_fill(~mask, -1e8))

    def value(self, seen: torch.Tensor) -> torch.Tensor:
        return self.critic(seen).squeeze(-1)


def look(observations: np.ndarray, info: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(observations), torch.from_numpy(info["action_mask"]).bool()


@torch.no_grad()
def rollout(envs: gymnasium.vector.VectorEnv, agent: Agent, start: tuple) -> dict:
    """One episode of every environment: tensors [T, E, ...]."""
    steps, over = [], False
    observations, info = start
    while not over:
        seen, mask = look(observations, info)
        policy = agent.policy(seen, mask)
        action = policy.sample()
        observations, rewards, ended, _, info = envs.step(action.numpy())
        over = bool(ended.all())
        reward = torch.from_numpy(rewards).float()
        steps.append((seen, mask, action, policy.log_prob(action), agent.value(seen), reward))
    names = ("seen", "mask", "action", "log_prob", "value", "reward")
    parts = zip(names, zip(*steps, strict=True), strict=True)
    return {name: torch.stack(part) for name, part in parts}


def advantages(batch: dict, args: Args) -> torch.Tensor:
    gain, last = torch.zeros_like(batch["reward"]), torch.zeros_like(batch["reward"][0])
    following = torch.cat([batch["value"][1:], torch.zeros_like(batch["value"][:1])])
    errors = batch["reward"] + args.gamma * following - batch["value"]
    for time in reversed(range(len(errors))):
        gain[time] = last = errors[time] + args.gamma * args.gae_lambda * last
    return gain


def loss_of(agent: Agent, part: dict, args: Args) -> torch.Tensor:
    policy = agent.policy(part["seen"], part["mask"])
    ratio = (policy.log_prob(part["action"]) - part["log_prob"]).exp()
    gain = (part["gain"] - part["gain"].mean()) / (part["gain"].std() + 1e-8)
    surrogate = torch.min(ratio * gain, ratio.clamp(1 - args.clip, 1 + args.clip) * gain).mean()
    error = (agent.value(part["seen"]) - part["target"]).square().mean()
    return -surrogate + args.value * error - args.entropy * policy.entropy().mean()


def train(args: Args, **settings: Any) -> Agent:
    """Train an agent; `settings` are those of the environment."""
    torch.manual_seed(args.seed)
    envs = gymnasium.make_vec(args.env_id, num_envs=args.num_envs, actions="flat", **settings)
    inputs, actions = envs.single_observation_space.shape[0], envs.single_action_space.n
    agent = Agent(inputs, int(actions), args.width)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    done, start = 0, envs.reset(seed=args.seed)
    while done < args.total_steps:
        batch = rollout(envs, agent, start)
        batch["gain"] = advantages(batch, args)
        batch["target"] = batch["gain"] + batch["value"]
        returns = batch["reward"].sum(0).mean()
        batch = {name: part.flatten(0, 1) for name, part in batch.items()}
        size = len(batch["gain"])
        for _ in range(args.epochs):
            for chosen in torch.randperm(size).chunk(args.minibatches):
                optimizer.zero_grad()
                loss_of(
                    agent, {name: part[chosen] for name, part in batch.items()}, args
                ).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        done += size
        print(f"{done:7d} steps, mean return {returns:+.3f}")
        start = envs.reset()
    return agent


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Args):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=field.type, default=field.default)
    train(Args(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
