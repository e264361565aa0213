"""The loop over hosts against its plainest form (`plain_loop.py`).

    python benchmarks/loop.py [--steps 14] [--envs 2] [--cases cifar10 digits ...]

Whole environment steps (an epoch of training, validation with counterfactuals, snapshots) with
random seeds, the two taking turns step by step, each in a process of its own. `cifar10` is the
host of that task on synthetic images; the plain way to augment them happens to lay them out
channels last, so `cifar10_as_is` leaves that out. `tiny` is a host of 63 parameters with one batch
per epoch. The last line is one JSON object: CPU time of the plain loop over that of the library,
medians over steps, and whether both came to the same losses, bit for bit.
"""

import argparse
import json
import multiprocessing
import time
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from esper.growth.grown_module import keyed
from esper.growth.hosts import CNNHost
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.controllers.simple import RandomController
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import GrowthEnv
from esper.tolaria.tasks import Task, find_task
from plain_loop import PlainCNNHost, PlainPopulation, augment

GOALS = {"cifar10": 1.5, "cifar10_as_is": 1.5, "digits": 1.0, "pydocs": 0.97, "tiny": 1.0}


@dataclass(frozen=True)
class Step:
    seconds: float
    val_loss: bytes
    seeds: float


def images(train: int, val: int, size: int, channels: int) -> DataSplits:
    with keyed(0):
        counts = (train, val, 1)
        x = [torch.randn(n, channels, size, size) for n in counts]
        y = [torch.randint(0, 10, (n,)) for n in counts]
    return DataSplits(x[0], y[0], x[1], y[1], x[2], y[2])


def case(name: str) -> tuple[Task, Task, DataSplits]:
    """The task, the same with the plain host, and data."""
    if name == "pydocs":
        task = find_task(name)
        return task, task, task.load(Path("unused"))
    if name == "digits":
        task, data = find_task(name), find_task(name).load(Path("unused"))
        host = {"num_classes": 10, "n_blocks": 3, "base_channels": 2, "in_channels": 1}
    elif name.startswith("cifar10"):
        task, data = find_task("cifar10"), images(4 * 128, 128, 32, 3)
        if name != "cifar10":
            task = replace(task, augment=None)
        host = {"base_channels": 8, "n_blocks": 3}
    else:
        task, data = replace(find_task("digits"), batch=16), images(16, 16, 8, 1)
        task = replace(task, slots=("blocks.0", "blocks.1"))
        host = {"n_blocks": 2, "base_channels": 1, "in_channels": 1}
    return (
        replace(task, build=partial(CNNHost, **host)),
        replace(task, build=partial(PlainCNNHost, **host), augment=task.augment and augment),
        data,
    )


def serve(plain: bool, name: str, envs: int, steps: int, pipe: Connection) -> None:
    """An arm in a process of its own, as hosts are trained; a step of it whenever it is asked."""
    torch.set_num_threads(1)
    task, plain_task, data = case(name)
    if plain:
        population: LoopedPopulation = PlainPopulation(plain_task.recipe(data), range(envs))
    else:
        population = LoopedPopulation(task.recipe(data), range(envs))
    env, controller = (
        GrowthEnv(population, GrowthSettings(steps, on_panic="terminate", keep_best=False)),
        RandomController(),
    )
    situation = env.reset()
    while pipe.recv():
        actions = controller.act(situation)
        began = time.process_time()
        situation = env.step(actions).after
        seconds = time.process_time() - began
        seeds = float(env.table.holds_seed.sum(axis=1).mean())
        pipe.send(Step(seconds, situation.signals.val_loss.tobytes(), seeds))


def compare(name: str, envs: int, steps: int) -> dict[str, float | bool]:
    context = multiprocessing.get_context("spawn")
    arms = []
    for plain in (True, False):
        ours, theirs = context.Pipe()
        arguments = (plain, name, envs, steps, theirs)
        context.Process(target=serve, args=arguments, daemon=True).start()
        arms.append(ours)
    found = []
    for _ in range(steps):
        pair = []
        for arm in arms:
            arm.send(True)
            pair.append(arm.recv())
        found.append(pair)
    for arm in arms:
        arm.send(False)
    return {
        "ratio": round(median(plain.seconds / ours.seconds for plain, ours in found), 3),
        "same_bits": all(plain.val_loss == ours.val_loss for plain, ours in found),
        "seeds_per_env": round(sum(ours.seeds for _, ours in found) / steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=list(GOALS), choices=GOALS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {}
    for name in arguments.cases:
        found = compare(name, arguments.envs, arguments.steps)
        print(f"{name:<14}{found['ratio']:6.2f}  same bits: {found['same_bits']}", flush=True)
        result[name] = {**found, "goal": GOALS[name], "met": found["ratio"] >= GOALS[name]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
