"""How much faster hosts are trained side by side than one after another.

    python benchmarks/population.py [case ...]

Each case plays the same random episode, whole environment steps with counterfactuals and snapshots,
through `GrowthEnv` on two populations, one step of each in turn. A figure is the ratio of CPU time,
the median over steps. The last line is one JSON object with the figures of all cases.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from esper.growth import LifecycleRules, MLPHost
from esper.leyline import OP, LifecycleOp, generator
from esper.tamiyo import RandomController, Situation, wait
from esper.tolaria import FusedPopulation, GrowthEnv, HostRecipe, LoopedPopulation, find_task

STEPS = 14
# Some are culled: this leaves about 1.5 in each environment.
SEEDS_PER_ENV = 1.75


class Sower:
    """Random seeds, kept for good, until each environment has its share: 1 or 2 of them."""

    def __init__(self, key: int) -> None:
        self.key, self.random = key, RandomController()

    def act(self, situation: Situation) -> np.ndarray:
        actions = self.random.act(situation)
        share = 1 + (generator(self.key, "share").random(situation.n_envs) < SEEDS_PER_ENV - 1)
        held = situation.table.holds_seed.sum(axis=1)
        stay = wait(situation.n_envs)
        sow = (actions[:, OP] == LifecycleOp.GERMINATE) & (held < share)
        keep = actions[:, OP] == LifecycleOp.FOSSILIZE
        return np.where((sow | keep)[:, None], actions, stay)


def _digits() -> HostRecipe:
    task = find_task("digits")
    return task.recipe(task.load(Path("unused")))


def _mlp() -> HostRecipe:
    return replace(_digits(), build=lambda: MLPHost(64, hidden=32), slots=("blocks.0", "blocks.1"))


def fused_over_looped(recipe: HostRecipe, n_envs: int) -> dict[str, float]:
    """Ratio of CPU times of the same steps; seeds per environment, and distinct pairs of slot and
    blueprint, that they had on average."""
    arms = [
        GrowthEnv(make(recipe, range(n_envs)), LifecycleRules(STEPS))  # type: ignore[operator]
        for make in (LoopedPopulation, FusedPopulation)
    ]
    sower, ratios, held, banks = Sower(1), [], [], []
    situations = [env.reset() for env in arms]
    for step in range(STEPS):
        actions = sower.act(situations[0])
        legal = situations[1].masks.allows(actions)
        actions[~legal] = wait(n_envs)[~legal]
        seconds = [0.0, 0.0]
        for arm in (0, 1) if step % 2 else (1, 0):
            began = time.process_time()
            situations[arm] = arms[arm].step(actions).after
            seconds[arm] = time.process_time() - began
        table = situations[1].table
        # The first steps have few seeds.
        if step >= STEPS // 3:
            ratios.append(seconds[0] / seconds[1])
            where = np.argwhere(table.holds_seed)
            held.append(len(where) / n_envs)
            banks.append(len({(slot, table.blueprint[env, slot]) for env, slot in where.tolist()}))
    return {
        "ratio": round(float(np.median(ratios)), 2),
        "seeds": round(float(np.mean(held)), 2),
        "banks": round(float(np.mean(banks)), 1),
    }


CASES: dict[str, Callable[[], dict[str, float]]] = {
    "digits_16": lambda: fused_over_looped(_digits(), 16),
    "digits_64": lambda: fused_over_looped(_digits(), 64),
    "mlp_64": lambda: fused_over_looped(_mlp(), 64),
}


def main() -> None:
    torch.set_num_threads(1)
    results: dict[str, float] = {}
    for name in sys.argv[1:] or CASES:
        found = CASES[name]()
        print(f"{name:<12}{found}", flush=True)
        results[name] = found["ratio"]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
