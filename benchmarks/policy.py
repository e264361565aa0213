"""How long a decision and an update of the network over sets take: decisions against the flat
network, updates against sb3-contrib's RecurrentPPO, in the same run.

    python benchmarks/policy.py [--repeats 7] [--compiled inductor]

Decisions are for 64 environments with three slots and all blueprints, both networks with the sizes
that training gives them; making their observations is measured separately. Updates see 16
episodes of 150 steps, with the same number of epochs and minibatches; RecurrentPPO has an LSTM as
wide as ours, once for actor and critic each and once for both, and observations of 80 numbers where
ours have a thousand. Measurements alternate; the last line is one JSON object with ratios of
medians (CPU time).

With `--compiled BACKEND` the comparison is between both networks compiled and run eagerly. The
first round, in which they are compiled, is reported apart, with the CPU time of the compiler.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import ActionMasks, LifecycleOp
from esper.leyline.growth_settings import GrowthSettings
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import action_draws
from esper.simic.training.config import load_config
from esper.simic.training.env_specs import Space
from esper.simic.training.state import new_state
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.policy.set_features import FITS, PRESENT, SetLayout
from esper.tamiyo.situation import Situation
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.run import make_env
from esper.tolaria.tasks import find_task
from ppo_update import ENVS, EPOCHS, MINIBATCHES, STEPS, Ours, Theirs, cpu_time

ACTING, SLOTS, DECISIONS = 64, 3, 40
NAMES = default_catalogue().names


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
    """Random observations and rewards; a few things are legal, as in a run, and all slots there."""

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


class ActsForMore(Ours):
    """Learns from 16 episodes, and acts for 64 environments."""

    def __init__(self, kind: str, backend: str | None = None) -> None:
        agent = new_agent(kind, backend)
        super().__init__(agent, Noise(agent, ENVS))
        self.acting, self.more = Noise(agent, ACTING), action_draws(0, 0, ACTING, STEPS)

    def act(self) -> None:
        observation, masks = self.acting.reset(0)
        hidden = self.agent.initial_hidden(ACTING)
        for step in range(DECISIONS):
            hidden = self.agent.act(observation, hidden, masks, self.more[:, step]).hidden


def situation() -> Situation:
    """Of 64 hosts in which something has grown."""
    task = find_task("digits")
    rules = GrowthSettings(steps=8, population="fused")
    env = make_env(task.recipe(task.load(data_root())), range(ACTING), rules)
    controller = make_controller("random")
    controller.reset(ACTING)
    seen = env.reset()
    for _ in range(3):
        seen = env.step(controller.act(seen)).after
    return seen


def looker(space: Space, seen: Situation) -> Callable[[], None]:
    def look() -> None:
        for _ in range(DECISIONS):
            space.observe(seen)

    return look


def compare_compiled(backend: str, repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    sides: dict[str, ActsForMore] = {}
    compiling = {}
    for kind in ("flat", "set"):
        # The compiler runs in other processes, too; their times come in steps of 10 ms.
        before = sum(os.times()[:4])
        sides[f"{kind}_compiled"] = ActsForMore(kind, backend)
        sides[f"{kind}_compiled"].act()
        sides[f"{kind}_compiled"].update()
        compiling[f"compile_{kind}_s"] = sum(os.times()[:4]) - before
        sides[f"{kind}_compiled"].collect()
        sides[kind] = ActsForMore(kind)
    for _ in range(repeats + 1):
        for name, side in sides.items():
            times.setdefault(f"act_{name}", []).append(cpu_time(side.act))
            times.setdefault(f"update_{name}", []).append(cpu_time(side.update))
            side.collect()
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    ratios = {
        f"{name}_compiled_over_eager": middle[f"{name}_compiled"] / middle[name]
        for name in ("act_flat", "act_set", "update_flat", "update_set")
    }
    absolute = {
        **{f"act_{kind}_us": 1e6 * middle[f"act_{kind}"] / DECISIONS for kind in ("flat", "set")},
        **{f"update_{kind}_ms": 1e3 * middle[f"update_{kind}"] for kind in ("flat", "set")},
    }
    return {**ratios, **absolute, **compiling, "repeats": repeats}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compiled", metavar="BACKEND")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    torch.set_num_threads(1)
    if arguments.compiled is not None:
        found = compare_compiled(arguments.compiled, repeats)
        print(json.dumps({name: round(value, 3) for name, value in found.items()}))
        return
    ours = {kind: ActsForMore(kind) for kind in ("flat", "set")}
    width = ours["set"].agent.network.config.lstm_hidden_dim
    theirs = {"sb3": Theirs(False, width), "sb3_shared_lstm": Theirs(True, width)}
    seen = situation()
    looks = {kind: looker(Space.of(SLOTS, NAMES, kind), seen) for kind in ours}
    times: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[[], None]) -> None:
        times.setdefault(name, []).append(cpu_time(function))

    for _ in range(repeats + 1):
        for kind, side in ours.items():
            timed(f"act_{kind}", side.act)
            timed(f"look_{kind}", looks[kind])
        for name, side in {**ours, **theirs}.items():
            timed(f"update_{name}", side.update)
            side.collect()
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    both = {kind: middle[f"act_{kind}"] + middle[f"look_{kind}"] for kind in ours}
    result = {
        "act_set_over_flat": middle["act_set"] / middle["act_flat"],
        "act_and_look_set_over_flat": both["set"] / both["flat"],
        "update_set_over_sb3": middle["update_set"] / middle["update_sb3"],
        "update_set_over_sb3_shared_lstm": middle["update_set"] / middle["update_sb3_shared_lstm"],
        "update_set_over_flat": middle["update_set"] / middle["update_flat"],
        **{f"act_{kind}_us": 1e6 * middle[f"act_{kind}"] / DECISIONS for kind in ours},
        **{f"look_{kind}_us": 1e6 * middle[f"look_{kind}"] / DECISIONS for kind in ours},
        "update_set_ms": 1e3 * middle["update_set"],
        "parameters_set": sum(p.numel() for p in ours["set"].agent.network.parameters()),
        "repeats": repeats,
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
