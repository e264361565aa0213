"""Does the agent learn? Medians over keys on a memory, a bandit and a growth problem.

    python benchmarks/agent_learns.py [--keys 5]

The last line is one JSON object: the share of cues answered, the steps to a mean reward of 0.95
for this agent and for sb3-contrib's MaskablePPO, and the share of the optimum of the analytic
growth problem with the seconds of CPU it took.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import gymnasium
import numpy as np
import torch
from sb3_contrib import MaskablePPO
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from esper.leyline import draw_key
from esper.simic import analytic
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import VectorEnv, action_draws, play_round
from toy_problems import ConditionalBandit, CueMemory

GOAL = 0.95


@dataclass(frozen=True)
class Problem:
    """A problem, and the settings with which it is learnt and tested."""

    env: Callable[[int, int], VectorEnv]
    sizes: tuple[int, int, int]
    steps: int
    num_envs: int
    rounds: int
    test_every: int
    width: int
    config: PPOConfig


CUE = Problem(
    env=CueMemory,
    sizes=(CueMemory.observation_dim, 1, 1),
    steps=10,
    num_envs=32,
    rounds=100,
    test_every=10,
    width=32,
    config=PPOConfig(learning_rate=3e-3, gamma=0.99, gae_lambda=0.95, entropy_coef=0.05),
)
GROWTH = Problem(
    env=analytic.AnalyticGrowth,
    sizes=(analytic.OBSERVATION_DIM, analytic.NUM_SLOTS, analytic.NUM_BLUEPRINTS),
    steps=analytic.HORIZON,
    num_envs=32,
    rounds=150,
    test_every=20,
    width=32,
    config=PPOConfig(
        learning_rate=2e-3,
        gamma=0.99,
        gae_lambda=0.95,
        entropy_coef=0.2,
        entropy_coef_end=0.02,
        entropy_anneal_updates=60,
    ),
)
BATCH, MINIBATCHES, EPOCHS, RATE = 512, 4, 4, 1e-3
BANDIT = Problem(
    env=ConditionalBandit,
    sizes=(3, ConditionalBandit.num_slots, ConditionalBandit.num_blueprints),
    steps=1,
    num_envs=BATCH,
    rounds=200,
    test_every=1,
    width=64,
    config=PPOConfig(learning_rate=RATE, epochs=EPOCHS, minibatches=MINIBATCHES, target_kl=None),
)


@dataclass(frozen=True)
class Learnt:
    score: float
    rounds: int
    cpu_seconds: float


def new_agent(problem: Problem, key: int) -> PPOAgent:
    config = NetworkConfig(*problem.sizes, feature_dim=problem.width, lstm_hidden_dim=problem.width)
    network = FactoredRecurrentActorCritic(config, draw_key(key, "weights"))
    return PPOAgent(network, problem.config)


def learn(problem: Problem, key: int, goal: float) -> Learnt:
    """Train until the mean return of greedy episodes reaches `goal` (sampled ones for T = 1)."""
    agent = new_agent(problem, key)
    env, test_env = problem.env(problem.num_envs, key), problem.env(512, draw_key(key, "test"))
    buffer = agent.new_buffer(problem.num_envs, problem.steps)
    test_buffer = agent.new_buffer(512, problem.steps)
    start, score, round_ = time.process_time(), float("-inf"), 0
    while round_ < problem.rounds and score < goal:
        draws = action_draws(key, round_, problem.num_envs, problem.steps)
        returns = play_round(agent, env, buffer, round_, draws)
        if problem.steps == 1:
            score = float(returns.mean())
        agent.update(buffer, torch.Generator().manual_seed(draw_key(key, "shuffle", round_)))
        round_ += 1
        if problem.steps > 1 and round_ % problem.test_every == 0:
            score = float(play_round(agent, test_env, test_buffer, round_, None).mean())
    return Learnt(score, round_, time.process_time() - start)


class OneBandit(gymnasium.Env):
    """ConditionalBandit for one environment, as Gymnasium and sb3-contrib want it."""

    observation_space = gymnasium.spaces.Box(0, 1, (3,))
    action_space = gymnasium.spaces.MultiDiscrete([4, 6, 3, 4])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.context = int(self.np_random.integers(3))
        return np.eye(3, dtype=np.float32)[self.context], {}

    def step(self, action: np.ndarray) -> tuple:
        reward = ConditionalBandit.rewards(np.array([self.context]), action[None])[0]
        return np.eye(3, dtype=np.float32)[self.context], float(reward), True, False, {}

    def action_masks(self) -> np.ndarray:
        return np.array([True] * 16 + [False])


def maskable_ppo_steps(key: int, entropy: float) -> int:
    """Steps until the mean reward of a batch of sampled actions reaches the goal."""

    class Until(BaseCallback):
        steps = 0

        def _on_step(self) -> bool:
            return not self.steps

        def _on_rollout_end(self) -> None:
            if not self.steps and self.model.rollout_buffer.rewards.mean() >= GOAL:
                self.steps = self.num_timesteps

    envs = DummyVecEnv([lambda: ActionMasker(OneBandit(), OneBandit.action_masks)] * 8)
    model = MaskablePPO(
        "MlpPolicy",
        envs,
        learning_rate=RATE,
        n_steps=BATCH // 8,
        batch_size=BATCH // MINIBATCHES,
        n_epochs=EPOCHS,
        ent_coef=entropy,
        seed=key,
        device="cpu",
    )
    until = Until()
    model.learn(BANDIT.rounds * BATCH, callback=until)
    return until.steps or BANDIT.rounds * BATCH


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=5)
    keys = range(parser.parse_args().keys)
    torch.set_num_threads(1)
    optimum = analytic.solve().optimum
    cue = [learn(CUE, key, 1.0) for key in keys]
    growth = [learn(GROWTH, key, GOAL * optimum) for key in keys]
    ours = [learn(BANDIT, key, GOAL).rounds * BATCH for key in keys]
    theirs = {
        entropy: [maskable_ppo_steps(key, entropy) for key in keys] for entropy in (0.0, 0.01)
    }
    best = min(theirs, key=lambda entropy: statistics.median(theirs[entropy]))
    for name, runs in (("cue", cue), ("growth", growth)):
        for run in runs:
            print(name, json.dumps(asdict(run)))
    print("bandit", ours, theirs)
    result = {
        "keys": len(keys),
        "cue_share_answered": statistics.median(run.score for run in cue),
        "bandit_steps": statistics.median(ours),
        "bandit_steps_maskable_ppo": statistics.median(theirs[best]),
        "growth_share_of_optimum": statistics.median(run.score / optimum for run in growth),
        "growth_cpu_seconds": statistics.median(run.cpu_seconds for run in growth),
        "growth_cpu_seconds_max": max(run.cpu_seconds for run in growth),
    }
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
