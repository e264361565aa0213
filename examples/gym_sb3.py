"""Train MaskablePPO and RecurrentPPO of sb3-contrib on the analytic growth problem.

    python examples/gym_sb3.py [--steps 40000]

MaskablePPO asks the environment for `action_masks()`. RecurrentPPO does not use
masks: an illegal action becomes WAIT.
"""

import argparse

import gymnasium
import numpy as np
import torch
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.utils import get_action_masks
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

import esper.gym


def environments(count: int, **settings: str) -> VecEnv:
    def make() -> gymnasium.Env:
        return gymnasium.make(esper.gym.ANALYTIC, **settings)

    envs = DummyVecEnv([make] * count)
    envs.seed(0)
    return envs


def mean_return(model: MaskablePPO | RecurrentPPO, envs: VecEnv) -> float:
    """Returns of one greedy episode in each environment."""
    observations, state = envs.reset(), None
    returns, over = np.zeros(envs.num_envs), np.ones(envs.num_envs, dtype=bool)
    while True:
        more = (
            {"action_masks": get_action_masks(envs)}
            if isinstance(model, MaskablePPO)
            else {"state": state, "episode_start": over}
        )
        actions, state = model.predict(observations, deterministic=True, **more)
        observations, rewards, over, _ = envs.step(actions)
        returns += rewards
        if over.all():
            return float(returns.mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    settings = {
        "learning_rate": 2e-3,
        "n_steps": 32,
        "batch_size": 128,
        "n_epochs": 4,
        "gamma": 1.0,
        "ent_coef": 0.02,
        "seed": 0,
        "device": "cpu",
    }

    envs = environments(16, actions="flat")
    masked = MaskablePPO("MlpPolicy", envs, **settings)
    masked.learn(steps)
    print(f"MaskablePPO: mean return {mean_return(masked, envs):+.3f}")

    envs = environments(16)
    recurrent = RecurrentPPO(
        "MlpLstmPolicy", envs, policy_kwargs={"lstm_hidden_size": 64}, **settings
    )
    recurrent.learn(steps)
    print(f"RecurrentPPO: mean return {mean_return(recurrent, envs):+.3f}")

    _, info = gymnasium.make(esper.gym.ANALYTIC).reset()
    print(f"the best policy: {info['optimal_value']:+.3f}")


if __name__ == "__main__":
    main()
