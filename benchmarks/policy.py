"""How long the policy takes to decide and to learn.

    python benchmarks/policy.py [--repeats 7] [--compiled inductor]

Decisions are for 64 environments with three slots and all blueprints, by the flat network and by
the one over sets, with the sizes that training gives them; making their observations counts.
Updates see 16 episodes of 150 steps and are compared with those of sb3-contrib's RecurrentPPO, with
an LSTM as wide as ours and the same number of epochs and minibatches; its observations have 80
numbers. Measurements take turns; the last line is one JSON object with ratios of medians (CPU
time).

With `--compiled BACKEND` both networks are compared compiled and run eagerly. The first round, in
which they are compiled, is reported apart, with the CPU time of the compiler.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import DummyVecEnv

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import ActionMasks, LifecycleOp
from esper.leyline.growth_settings import GrowthSettings
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import action_draws, play_round
from esper.simic.training.config import load_config
from esper.simic.training.env_specs import Space
from esper.simic.training.state import new_state
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.policy.set_features import FITS, PRESENT, SetLayout
from esper.tamiyo.situation import Situation
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.run import make_env
from esper.tolaria.tasks import find_task

ENVS, STEPS, OBS = 16, 150, 80
EPOCHS, MINIBATCHES = 4, 4
ACTING, SLOTS, DECISIONS = 64, 3, 40
NAMES = default_catalogue().names
KINDS = ("flat", "set")


def new_agent(kind: str, backend: str | None = None) -> PPOAgent:
    config = load_config(None, {"network.kind": kind})
    ppo = replace(
        config.ppo,
        epochs=EPOCHS,
        minibatches=MINIBATCHES,
        target_kl=None,
        compile_backend=backend,
    )
    return new_state(replace(config, ppo=ppo), Space.of(SLOTS, NAMES, kind)).agent


class Noise:
    """Random observations and rewards; a few things are legal, as in a run. An episode has STEPS
    steps."""

    def __init__(self, agent: PPOAgent, num_envs: int) -> None:
        self.config, self.num_envs = agent.network.config, num_envs
        self.groups = np.arange(num_envs)

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        self.rng, self.time = np.random.default_rng(round_), 0
        slot = self.rng.random((self.num_envs, 4, SLOTS)) < 0.5
        slot[:, LifecycleOp.WAIT] = True
        blueprint = self.rng.random((self.num_envs, SLOTS, len(NAMES))) < 0.5
        blueprint[..., 1] = True
        blend = np.ones((self.num_envs, 3), dtype=bool)
        self.masks = ActionMasks(slot.any(axis=-1), slot, blueprint, blend)
        return self._observation(), self.masks

    def step(self, actions: np.ndarray) -> tuple:
        self.time += 1
        rewards = self.rng.normal(size=self.num_envs).astype(np.float32)
        ended = np.full(self.num_envs, self.time == STEPS)
        return self._observation(), self.masks, rewards, ended, np.zeros_like(ended)

    def _observation(self) -> np.ndarray:
        seen = self.rng.normal(size=(self.num_envs, self.config.observation_dim))
        seen = seen.clip(-2, 2).astype(np.float32)
        if self.config.kind == "set":
            _, slots, candidates = SetLayout(SLOTS, len(NAMES)).split(torch.from_numpy(seen))
            slots[..., PRESENT] = 1.0
            fits = (candidates[..., FITS] > 0).float()
            candidates[..., FITS] = 1.0
            candidates.mul_(fits.unsqueeze(-1))
        return seen


class Ours:
    """Learns from 16 episodes, and acts for 64 environments."""

    def __init__(self, kind: str, backend: str | None = None) -> None:
        self.agent = new_agent(kind, backend)
        self.env = Noise(self.agent, ENVS)
        self.buffer = self.agent.new_buffer(ENVS, STEPS)
        self.draws = action_draws(0, 0, ENVS, STEPS)
        self.acting, self.more = Noise(self.agent, ACTING), action_draws(0, 0, ACTING, STEPS)
        self.collect()

    @property
    def lstm(self) -> int:
        return self.agent.network.config.lstm_hidden_dim

    def collect(self) -> None:
        play_round(self.agent, self.env, self.buffer, 0, self.draws)

    def update(self) -> None:
        metrics = self.agent.update(self.buffer, torch.Generator().manual_seed(0))
        assert metrics.optimizer_steps == EPOCHS * MINIBATCHES

    def act(self) -> None:
        observation, masks = self.acting.reset(0)
        hidden = self.agent.initial_hidden(ACTING)
        for step in range(DECISIONS):
            hidden = self.agent.act(observation, hidden, masks, self.more[:, step]).hidden


class OneNoise(gymnasium.Env):
    """The same for one environment, with one head per choice, as sb3-contrib wants it."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBS,))
    action_space = gymnasium.spaces.MultiDiscrete([SLOTS, len(NAMES), 3, 4])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.time = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple:
        self.time += 1
        return self._observation(), float(self.np_random.normal()), self.time == STEPS, False, {}

    def _observation(self) -> np.ndarray:
        return self.np_random.normal(size=OBS).astype(np.float32)


class Theirs:
    """RecurrentPPO with its own defaults, but an LSTM as wide as ours."""

    def __init__(self, lstm: int) -> None:
        self.model = RecurrentPPO(
            "MlpLstmPolicy",
            DummyVecEnv([OneNoise] * ENVS),
            n_steps=STEPS,
            batch_size=ENVS * STEPS // MINIBATCHES,
            n_epochs=EPOCHS,
            seed=0,
            device="cpu",
            policy_kwargs={"lstm_hidden_size": lstm, "net_arch": {"pi": [64], "vf": [64]}},
        )
        _, self.callback = self.model._setup_learn(1_000_000, None)
        self.collect()

    def collect(self) -> None:
        model = self.model
        model.collect_rollouts(model.env, self.callback, model.rollout_buffer, STEPS)

    def update(self) -> None:
        self.model.train()


def cpu_time(function: Callable[[], None]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def situation() -> Situation:
    """Of 64 hosts in which something has grown."""
    task = find_task("digits")
    settings = GrowthSettings(steps=8, population="fused")
    env = make_env(task.recipe(task.load(data_root())), range(ACTING), settings)
    controller = make_controller("random")
    controller.reset(ACTING)
    seen = env.reset()
    for _ in range(3):
        seen = env.step(controller.act(seen)).after
    return seen


def compare(repeats: int) -> dict[str, float]:
    """Ratios of medians; times of one decision in microseconds, of an update in milliseconds."""
    ours = {kind: Ours(kind) for kind in KINDS}
    theirs = {kind: Theirs(side.lstm) for kind, side in ours.items()}
    seen, spaces = situation(), {kind: Space.of(SLOTS, NAMES, kind) for kind in KINDS}
    times: dict[str, list[float]] = {}

    def observe(kind: str) -> None:
        for _ in range(DECISIONS):
            spaces[kind].observe(seen)

    for _ in range(repeats + 1):
        for kind in KINDS:
            times.setdefault(f"act_{kind}", []).append(cpu_time(ours[kind].act))
            times.setdefault(f"observe_{kind}", []).append(cpu_time(lambda k=kind: observe(k)))
            for name, side in (("ours", ours[kind]), ("theirs", theirs[kind])):
                times.setdefault(f"update_{kind}_{name}", []).append(cpu_time(side.update))
                side.collect()
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    both = {kind: middle[f"act_{kind}"] + middle[f"observe_{kind}"] for kind in KINDS}
    return {
        **{
            f"update_{kind}_over_sb3": middle[f"update_{kind}_ours"]
            / middle[f"update_{kind}_theirs"]
            for kind in KINDS
        },
        "observe_and_act_set_over_flat": both["set"] / both["flat"],
        **{
            f"{what}_{kind}_us": 1e6 * middle[f"{what}_{kind}"] / DECISIONS
            for what in ("act", "observe")
            for kind in KINDS
        },
        **{f"update_{kind}_ms": 1e3 * middle[f"update_{kind}_ours"] for kind in KINDS},
    }


def compare_compiled(backend: str, repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    sides: dict[str, Ours] = {}
    compiling = {}
    for kind in KINDS:
        # The compiler runs in other processes, too; their times come in steps of 10 ms.
        before = sum(os.times()[:4])
        sides[f"{kind}_compiled"] = Ours(kind, backend)
        sides[f"{kind}_compiled"].act()
        sides[f"{kind}_compiled"].update()
        compiling[f"compile_{kind}_s"] = sum(os.times()[:4]) - before
        sides[f"{kind}_compiled"].collect()
        sides[kind] = Ours(kind)
    for _ in range(repeats + 1):
        for name, side in sides.items():
            times.setdefault(f"act_{name}", []).append(cpu_time(side.act))
            times.setdefault(f"update_{name}", []).append(cpu_time(side.update))
            side.collect()
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    ratios = {
        f"{what}_{kind}_compiled_over_eager": middle[f"{what}_{kind}_compiled"]
        / middle[f"{what}_{kind}"]
        for what in ("act", "update")
        for kind in KINDS
    }
    return ratios | compiling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compiled", metavar="BACKEND")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.compiled is None:
        found = compare(options.repeats)
    else:
        found = compare_compiled(options.compiled, options.repeats)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
