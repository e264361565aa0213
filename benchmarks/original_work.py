"""The two workloads on which the original system was timed, on ours: whole training runs.

    python benchmarks/original_work.py [--rounds 3] [--repeats 3]

`cifar` is a host of 6,418 parameters on images of 3x32x32, batches of 128, 4 for training and 1 for
validation at each step, 8 environments. `tiny` is one of 77 parameters, batches of 16, 1 and 1;
since it costs next to nothing, it is also timed with 64 environments. The environments of training
runs play rounds with random actions, whole steps with counterfactuals, observations and rewards,
with one and with two workers in turn; the first round is left out.

The original cannot be run here. Where it could, it did 9.6 and 115 environment steps per CPU
second, and the plain loop (`plain_loop.py`), in turn with it, 0.77 and 1.1 times as many. Machines
differ, so the plain loop is timed in turn with ours as well, and the original is reckoned from it.
The last line is one JSON object: environment steps per CPU second and per wall second with 1 and 2
workers, those of the plain loop per CPU second, medians, and our ratios to the original.
Needs two idle cores.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from esper.growth.grown_module import keyed
from esper.growth.hosts import CNNHost
from esper.leyline import ActionMasks, draw_key, generator
from esper.leyline.growth_settings import GrowthSettings
from esper.simic.training.config import load_config
from esper.simic.training.round_log import RoundLog
from esper.simic.training.workers import growth_environments
from esper.tolaria.data.splits import DataSplits, share
from esper.tolaria.engine.run import GrowthEnv
from esper.tolaria.fused.choice import choose_population
from esper.tolaria.tasks import Task, find_task
from plain_loop import PlainCNNHost, PlainPopulation

STEPS, PLAIN_ENVS = 10, 8


@dataclass(frozen=True)
class Work:
    base_channels: int
    kernel_size: int
    batch: int
    train_batches: int
    envs: int
    plain_over_original: float
    goal: float

    def task(self, host: type[CNNHost] = CNNHost) -> Task:
        return replace(
            find_task("cifar10"),
            build=partial(host, base_channels=self.base_channels, kernel_size=self.kernel_size),
            load=partial(noise, self.train_batches * self.batch, self.batch),
            batch=self.batch,
            val_batch=self.batch,
            batches_per_epoch=None,
            augment=None,
        )


WORKS = {
    "cifar": Work(8, 3, batch=128, train_batches=4, envs=8, plain_over_original=0.77, goal=3.0),
    "tiny": Work(1, 1, batch=16, train_batches=1, envs=8, plain_over_original=1.1, goal=10.0),
    "tiny_64": Work(1, 1, batch=16, train_batches=1, envs=64, plain_over_original=1.1, goal=10.0),
}


def noise(train: int, val: int, root: Path) -> DataSplits:
    """Images and labels that mean nothing: only the work counts."""
    with keyed(0):
        x = [torch.randn(n, 3, 32, 32) for n in (train, val, 1)]
        y = [torch.randint(0, 10, (n,)) for n in (train, val, 1)]
    return DataSplits(x[0], y[0], x[1], y[1], x[2], y[2])


def draw(masks: ActionMasks, random: np.random.Generator) -> np.ndarray:
    """A legal action for each environment, at random."""

    def pick(legal: np.ndarray) -> np.ndarray:
        """The place of a True in each row, at random; 0 where there is none."""
        return np.argmax(legal * random.uniform(0.5, 1.0, legal.shape), axis=1)

    envs = np.arange(len(masks.op))
    op = pick(masks.op)
    slot = pick(masks.slot[envs, op])
    blueprint = pick(masks.blueprint[envs, slot])
    return np.stack([slot, blueprint, pick(masks.blend), op], axis=1)


def speeds(work: Work, rounds: int, workers: int) -> tuple[float, float, str]:
    """Environment steps per CPU second of this process and per wall second, from the second round
    on, and the population that trains the hosts."""
    task = work.task()
    data = share(task.load(Path("unused")))
    config = load_config(flags={"envs": work.envs, "steps": STEPS})
    kind = choose_population(task.recipe(data), work.envs)
    random = generator(0, "actions")
    with growth_environments(config, task, data, RoundLog(), ("cpu",) * workers) as env:
        for round_ in range(1 + rounds):
            if round_ == 1:
                began = time.process_time(), time.perf_counter()
            _, masks = env.reset(round_)
            for _ in range(STEPS):
                _, masks, *_ = env.step(draw(masks, random))
        cpu, wall = time.process_time() - began[0], time.perf_counter() - began[1]
    steps = work.envs * STEPS * rounds
    return steps / cpu, steps / wall, kind


def plain_speed(work: Work, rounds: int) -> float:
    """Environment steps of the plain loop per CPU second; it has no rewards and observations."""
    task = work.task(PlainCNNHost)
    recipe, random = task.recipe(task.load(Path("unused"))), generator(0, "actions")
    seconds = 0.0
    for round_ in range(1 + rounds):
        began = time.process_time()
        keys = [draw_key(0, "host", round_, env) for env in range(PLAIN_ENVS)]
        env = GrowthEnv(
            PlainPopulation(recipe, keys),
            GrowthSettings(STEPS, on_panic="terminate", keep_best=False),
        )
        masks = env.reset().masks
        for _ in range(STEPS):
            masks = env.step(draw(masks, random)).after.masks
        seconds += (time.process_time() - began) * (round_ > 0)
    return PLAIN_ENVS * STEPS * rounds / seconds


def measure(work: Work, rounds: int, repeats: int) -> dict[str, object]:
    found = [
        (speeds(work, rounds, 1), speeds(work, rounds, 2), plain_speed(work, rounds))
        for _ in range(repeats)
    ]
    per_cpu = median(one[0] for one, *_ in found)
    wall = [median(each[i][1] for each in found) for i in (0, 1)]
    plain = median(each[2] for each in found)
    original = plain / work.plain_over_original
    return {
        "per_cpu_second": round(per_cpu, 1),
        "per_wall_second": {"1": round(wall[0], 1), "2": round(wall[1], 1)},
        "plain_per_cpu_second": round(plain, 1),
        "over_the_original_per_cpu_second": round(per_cpu / original, 2),
        "over_the_original": round(wall[1] / original, 2),
        "population": found[0][0][2],
        "goal": work.goal,
        "met": wall[1] / original >= work.goal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    for name, work in WORKS.items():
        result[name] = measure(work, arguments.rounds, arguments.repeats)
        print(f"{name:<8} {result[name]}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
