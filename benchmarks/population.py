"""How much faster hosts are trained together than one after another.

    python benchmarks/population.py [case ...]
    python benchmarks/population.py table      hosts of several widths, by number: where fused wins

`digits_16`, `digits_64` and `mlp_64` play the same random episode, whole environment steps with
counterfactuals and snapshots, through `GrowthEnv` on the looped and the fused population, one step
of each in turn.
`evaluate_digits` trains 20 keys of one arm of an evaluation one by one and side by side. A figure
is the ratio of CPU times, the median over steps or repeats. The last line is one JSON object with
the figures of all cases.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

from esper.growth.blueprints.catalogue import count_params
from esper.growth.hosts import CNNHost, MLPHost
from esper.leyline import OP, LifecycleOp, generator
from esper.leyline.growth_settings import GrowthSettings
from esper.proof.arms import Plan, train
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.simple import RandomController
from esper.tamiyo.situation import Situation, wait
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthEnv
from esper.tolaria.fused.population import FusedPopulation
from esper.tolaria.tasks import find_task

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


def _cnn(width: int) -> HostRecipe:
    return replace(_digits(), build=lambda: CNNHost(10, 3, width, in_channels=1))


def _mlp(width: int) -> HostRecipe:
    slots = ("blocks.0", "blocks.1")
    return replace(_digits(), build=lambda: MLPHost(64, hidden=width), slots=slots)


def fused_over_looped(recipe: HostRecipe, n_envs: int) -> dict[str, float]:
    """Ratio of CPU times of the same steps; seeds per environment, and distinct pairs of slot and
    blueprint, that they had on average."""
    arms = [
        GrowthEnv(
            make(recipe, range(n_envs)),
            GrowthSettings(STEPS, on_panic="terminate", keep_best=False),
        )  # type: ignore[operator]
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


def evaluation_speedup(keys: int = 20, steps: int = 8, repeats: int = 3) -> dict[str, float]:
    """One arm of an evaluation: each key by itself in the loop, over all of them fused."""
    task = find_task("digits")
    data = task.load(Path("unused"))
    ratios = []
    for _ in range(repeats):
        seconds = []
        for kind, blocks in (("looped", [[key] for key in range(keys)]), ("fused", [range(keys)])):
            plan = Plan(task, make_controller("heuristic"), GrowthSettings(steps, population=kind))
            began = time.process_time()
            for block in blocks:
                train(plan, data, block, attribute=True)
            seconds.append(time.process_time() - began)
        ratios.append(seconds[0] / seconds[1])
    return {"ratio": round(float(np.median(ratios)), 2)}


CASES: dict[str, tuple[float, Callable[[], dict[str, float]]]] = {
    "digits_16": (2.5, lambda: fused_over_looped(_digits(), 16)),
    "digits_64": (4.5, lambda: fused_over_looped(_digits(), 64)),
    "mlp_64": (3.0, lambda: fused_over_looped(_mlp(32), 64)),
    "evaluate_digits": (3.0, evaluation_speedup),
}


def table() -> dict[str, float]:
    """Where the rule of `tolaria/fused/choice.py` comes from."""
    found = {}
    for name, make, widths in (("cnn", _cnn, (2, 8, 16, 32)), ("mlp", _mlp, (32, 64, 128, 256))):
        for width, n_envs in product(widths, (1, 2, 4, 16)):
            recipe = make(width)
            ratio = fused_over_looped(recipe, n_envs)["ratio"]
            params = count_params(recipe.build())
            print(
                f"{name} {width:>4} {params:>7,} parameters {n_envs:>3} hosts {ratio:6.2f}",
                flush=True,
            )
            found[f"{name}_{width}_{n_envs}"] = ratio
    return found


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["table"]:
        print(json.dumps(table()))
        return
    results: dict[str, dict[str, object]] = {}
    for name in sys.argv[1:] or CASES:
        goal, measure = CASES[name]
        found = measure()
        print(f"{name:<16}{found}", flush=True)
        results[name] = {**found, "goal": goal, "met": found["ratio"] >= goal}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
