"""The two workloads on which the original system was timed, as whole rounds of `esper train ppo`.

    python benchmarks/original_work.py [case ...] [--rounds 2] [--repeats 5]

`cifar` is a host of 6,418 parameters on images of 3x32x32, batches of 128, 4 for training and 1 for
validation at each step, 8 environments. `tiny` is one of 77 parameters, batches of 16, 1 and 1;
`tiny_64` is the same with 64 environments. The policy never plants (`none`), keeps the three seeds
that its hosts begin with (`kept`), or does what it likes (`free`). A round is everything: episodes
with observations, masks and rewards, the update of the policy, telemetry and a checkpoint. The
first round is left out.

The original cannot be run here. Where it could, a plain loop over the same hosts
(`plain_loop.py`) made PLAIN_OVER_ORIGINAL times as many environment steps per CPU second as the
whole loop of the original. Machines differ, so the plain loop is timed in turn with ours, and the
original is estimated from it. `workers` is the CPU time of two workers over that of one. The last
line is one JSON object: ratios of medians.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from esper.api.training import train_ppo
from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.devices import keyed
from esper.growth.hosts import CNNHost
from esper.leyline import ActionMasks, draw_key, generator
from esper.leyline.growth_settings import GrowthSettings, Topology
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.loop import Hooks
from esper.tamiyo.situation import wait
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.run import GrowthEnv
from esper.tolaria.tasks import Task, find_task
from plain_loop import PlainCNNHost, PlainPopulation

PLAIN_OVER_ORIGINAL = {"cifar": 0.63, "tiny": 1.0}
# An op with such a logit is never drawn.
NEVER = -30.0
PLAIN_ENVS = 8


@dataclass(frozen=True)
class Work:
    host: str
    envs: int
    steps: int
    seeds: str  # none, kept or free

    def task(self, host: type[CNNHost] = CNNHost) -> Task:
        wide = self.host == "cifar"
        channels, kernel, batch, batches = (8, 3, 128, 4) if wide else (1, 1, 16, 1)
        return replace(
            find_task("cifar10"),
            build=partial(host, base_channels=channels, kernel_size=kernel),
            load=partial(noise, batches * batch, batch),
            batch=batch,
            val_batch=batch,
            batches_per_epoch=None,
            augment=None,
        )

    @property
    def topology(self) -> Topology:
        if self.seeds != "kept":
            return ()
        blueprint = default_catalogue().names.index("conv_light")
        return tuple((slot, blueprint) for slot in range(3))

    def config(self, rounds: int) -> TrainingConfig:
        flags: dict[str, object] = {"envs": self.envs, "rounds": rounds, "growth.steps": self.steps}
        if self.seeds != "free":
            flags["network.op_bias"] = {"GERMINATE": NEVER, "CULL": NEVER}
        config = load_config(flags=flags)
        return replace(config, growth=replace(config.growth, topology=self.topology))


WORKS = {
    "cifar_none": Work("cifar", 8, 10, "none"),
    "cifar_kept": Work("cifar", 8, 10, "kept"),
    "tiny_free": Work("tiny", 8, 25, "free"),
    "tiny_64_none": Work("tiny", 64, 25, "none"),
    "tiny_64_kept": Work("tiny", 64, 25, "kept"),
}


def noise(train: int, val: int, root: Path) -> DataSplits:
    """Images and labels that mean nothing: only the work counts."""
    with keyed(0):
        x = [torch.randn(n, 3, 32, 32) for n in (train, val, 1)]
        y = [torch.randint(0, 10, (n,)) for n in (train, val, 1)]
    return DataSplits(x[0], y[0], x[1], y[1], x[2], y[2])


def cpu_seconds() -> float:
    """Of this process and its living workers."""
    seconds = time.process_time()
    for child in multiprocessing.active_children():
        after_name = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def seconds_per_step(work: Work, rounds: int, workers: int = 1) -> float:
    """CPU seconds of an environment step, from the second round on."""
    ends: list[float] = []
    hooks = Hooks(on_round=lambda *row: ends.append(cpu_seconds()))
    with tempfile.TemporaryDirectory() as folder:
        config = work.config(1 + rounds)
        train_ppo(config, Path(folder) / "run", task=work.task(), workers=workers, hooks=hooks)
    return (ends[-1] - ends[0]) / (rounds * work.envs * work.steps)


def plain_seconds_per_step(work: Work, rounds: int) -> float:
    """The same for the plain loop; it has no rewards and observations, and no policy."""
    task = work.task(PlainCNNHost)
    recipe, random = task.recipe(task.load(Path("unused"))), generator(0, "actions")
    seconds = 0.0
    for round_ in range(1 + rounds):
        began = time.process_time()
        keys = [draw_key(0, "host", round_, env) for env in range(PLAIN_ENVS)]
        settings = GrowthSettings(
            work.steps, on_panic="terminate", keep_best=False, topology=work.topology
        )
        env = GrowthEnv(PlainPopulation(recipe, keys), settings)
        masks = env.reset().masks
        for _ in range(work.steps):
            drawn = draw(masks, random) if work.seeds == "free" else wait(PLAIN_ENVS)
            masks = env.step(drawn).after.masks
        seconds += (time.process_time() - began) * (round_ > 0)
    return seconds / (rounds * PLAIN_ENVS * work.steps)


def draw(masks: ActionMasks, random: np.random.Generator) -> np.ndarray:
    """A legal action for each environment, at random."""

    def pick(legal: np.ndarray) -> np.ndarray:
        """The index of a True in each row, at random; 0 where there is none."""
        return np.argmax(legal * random.uniform(0.5, 1.0, legal.shape), axis=1)

    envs = np.arange(len(masks.op))
    op = pick(masks.op)
    slot = pick(masks.slot[envs, op])
    blueprint = pick(masks.blueprint[envs, slot])
    return np.stack([slot, blueprint, pick(masks.blend), op], axis=1)


def over_the_original(work: Work, rounds: int, repeats: int) -> float:
    """Our environment steps per CPU second over those of the original."""
    pairs = [
        (seconds_per_step(work, rounds), plain_seconds_per_step(work, rounds))
        for _ in range(repeats)
    ]
    ours, plain = (median(side) for side in zip(*pairs, strict=True))
    return plain / ours * PLAIN_OVER_ORIGINAL[work.host]


def two_workers_over_one(rounds: int, repeats: int) -> float:
    work = WORKS["tiny_64_kept"]
    pairs = [
        (seconds_per_step(work, rounds, 2), seconds_per_step(work, rounds)) for _ in range(repeats)
    ]
    two, one = (median(side) for side in zip(*pairs, strict=True))
    return two / one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[*WORKS, "workers"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    for name in arguments.cases:
        if name == "workers":
            found = two_workers_over_one(arguments.rounds, arguments.repeats)
        else:
            found = over_the_original(WORKS[name], arguments.rounds, arguments.repeats)
        result[name] = round(found, 3)
        print(f"{name:<14} {found:.2f}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
