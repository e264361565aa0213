"""How long an update and a decision take, against sb3-contrib's RecurrentPPO in the same run.

    python benchmarks/ppo_update.py [--repeats 5]

Both see 16 episodes of 150 steps, observations of 80 numbers, an LSTM of 128, the same number of
epochs and minibatches of the same size. Measurements alternate; the last line is one JSON object
with ratios of medians (ours / theirs, CPU time).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import DummyVecEnv

from esper.leyline import ActionMasks
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import VectorEnv, action_draws, play_round

ENVS, STEPS, OBS, HIDDEN = 16, 150, 80, 128
SLOTS, BLUEPRINTS = 3, 13
EPOCHS, MINIBATCHES = 4, 4


class Noise:
    """Random observations and rewards; everything is legal and episodes last STEPS steps."""

    num_envs = ENVS
    groups = np.arange(ENVS)

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        self.rng, self.time = np.random.default_rng(round_), 0
        self.masks = ActionMasks(
            *(
                np.ones(shape, dtype=bool)
                for shape in ((ENVS, 4), (ENVS, 4, SLOTS), (ENVS, SLOTS, BLUEPRINTS), (ENVS, 3))
            )
        )
        return self._observation(), self.masks

    def step(self, actions: np.ndarray) -> tuple:
        self.time += 1
        rewards = self.rng.normal(size=ENVS).astype(np.float32)
        ended = np.full(ENVS, self.time == STEPS)
        return self._observation(), self.masks, rewards, ended, np.zeros_like(ended)

    def _observation(self) -> np.ndarray:
        return self.rng.normal(size=(ENVS, OBS)).astype(np.float32)


class OneNoise(gymnasium.Env):
    """The same for one environment, with one head per choice, as sb3-contrib wants it."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBS,))
    action_space = gymnasium.spaces.MultiDiscrete([SLOTS, BLUEPRINTS, 3, 4])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.time = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple:
        self.time += 1
        return self._observation(), float(self.np_random.normal()), self.time == STEPS, False, {}

    def _observation(self) -> np.ndarray:
        return self.np_random.normal(size=OBS).astype(np.float32)


def new_agent() -> PPOAgent:
    sizes = NetworkConfig(OBS, SLOTS, BLUEPRINTS, lstm_hidden_dim=HIDDEN)
    config = PPOConfig(epochs=EPOCHS, minibatches=MINIBATCHES, target_kl=None)
    return PPOAgent(FactoredRecurrentActorCritic(sizes), config)


class Ours:
    def __init__(self, agent: PPOAgent, env: VectorEnv) -> None:
        self.agent, self.env = agent, env
        self.buffer = agent.new_buffer(ENVS, STEPS)
        self.draws = action_draws(0, 0, ENVS, STEPS)
        self.collect()

    def collect(self) -> None:
        play_round(self.agent, self.env, self.buffer, 0, self.draws)

    def update(self) -> None:
        metrics = self.agent.update(self.buffer, torch.Generator().manual_seed(0))
        assert metrics.optimizer_steps == EPOCHS * MINIBATCHES

    def act(self) -> None:
        observation, masks = self.env.reset(0)
        hidden = self.agent.initial_hidden(ENVS)
        for step in range(STEPS):
            hidden = self.agent.act(observation, hidden, masks, self.draws[:, step]).hidden


class Theirs:
    """RecurrentPPO with its own defaults, or with one LSTM for actor and critic as ours has."""

    def __init__(self, shared_lstm: bool, hidden: int = HIDDEN) -> None:
        self.model = RecurrentPPO(
            "MlpLstmPolicy",
            DummyVecEnv([OneNoise] * ENVS),
            n_steps=STEPS,
            batch_size=ENVS * STEPS // MINIBATCHES,
            n_epochs=EPOCHS,
            seed=0,
            device="cpu",
            policy_kwargs={
                "lstm_hidden_size": hidden,
                "net_arch": {"pi": [64], "vf": [64]},
                "shared_lstm": shared_lstm,
                "enable_critic_lstm": not shared_lstm,
            },
        )
        _, self.callback = self.model._setup_learn(1_000_000, None)
        self.collect()

    def collect(self) -> None:
        model = self.model
        model.collect_rollouts(model.env, self.callback, model.rollout_buffer, STEPS)

    def update(self) -> None:
        self.model.train()

    def act(self) -> None:
        observation = np.random.default_rng(0).normal(size=(ENVS, OBS)).astype(np.float32)
        states, policy = self.model._last_lstm_states, self.model.policy
        starts = torch.zeros(ENVS)
        policy.set_training_mode(False)
        for _ in range(STEPS):
            with torch.no_grad():
                actions, _, _, states = policy.forward(torch.as_tensor(observation), states, starts)
            actions.numpy()


def cpu_time(function: Callable[[], None]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    sides = {
        "ours": Ours(new_agent(), Noise()),
        "theirs": Theirs(False),
        "theirs_shared": Theirs(True),
    }
    update: dict[str, list[float]] = {name: [] for name in sides}
    act: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            timed = cpu_time(side.update), cpu_time(side.act)
            side.collect()
            if repeat:
                update[name].append(timed[0])
                act[name].append(timed[1])
    update_median = {name: statistics.median(values) for name, values in update.items()}
    act_median = {name: statistics.median(values) for name, values in act.items()}
    result = {
        "update_ratio": update_median["ours"] / update_median["theirs"],
        "update_ratio_shared_lstm": update_median["ours"] / update_median["theirs_shared"],
        "act_ratio": act_median["ours"] / act_median["theirs"],
        "act_ratio_shared_lstm": act_median["ours"] / act_median["theirs_shared"],
        "update_cpu_ms": 1e3 * update_median["ours"],
        "act_cpu_us": 1e6 * act_median["ours"] / STEPS,
        "repeats": repeats,
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
