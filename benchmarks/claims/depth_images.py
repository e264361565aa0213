"""Claim L: does a ResNet that grows from 8 to 20 layers pay?

    python benchmarks/claims/depth_images.py [--keys 5] [--results FILE]
    python benchmarks/claims/depth_images.py --pilot

The protocol is in docs/claims.md. Finished trials are in the file of results; the script goes on
where it was stopped. The last line is one JSON object. `--pilot` runs all arms at every rate on a
key that the final run does not use, on validation only.
"""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import RESULTS, compare, means, print_comparisons, print_json, print_table, run_missing
from esper.leyline.depth import Depth
from esper.leyline.growth_settings import GrowthSettings, RateSchedule
from esper.proof.compute import fit_to_budget, host_size, training_macs
from esper.tamiyo.controllers.depth import DepthController
from esper.tamiyo.controllers.simple import StaticController
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.run import play_run
from esper.tolaria.tasks import Task, find_task

WIDTH = 8
STAGES = ("layer1", "layer2", "layer3")
BLOCKS = 3  # of each stage: 20 layers
EPOCHS = 16  # of the network of 20 layers with the full budget
RATES = (3e-3, 1e-2)
SCHEDULE = RateSchedule(warmup=0.05, decay=0.3)
PILOT_KEY = 1000
FULL, LOW = 1.0, 0.65


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = nn.Sequential()
        if stride != 1 or width != out:
            self.short = nn.Sequential(
                nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (self.short(x) + y).relu()


class ResNet(nn.Module):
    """6 * blocks + 2 layers."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        before = width
        for number, name in enumerate(STAGES):
            out, stride = width * 2**number, 1 if number == 0 else 2
            first = Block(before, out, stride)
            rest = (Block(out, out, 1) for _ in range(blocks - 1))
            self.add_module(name, nn.Sequential(first, *rest))
            before = out
        self.head = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in STAGES:
            x = self.get_submodule(name)(x)
        return self.head(x.mean(dim=(2, 3)))


@dataclass(frozen=True)
class Arm:
    """`blocks` of each stage at the start; `at` is the share of the budget after which the others
    come, None for a static network. `budget` is a share of what training 20 layers costs."""

    blocks: int
    at: float | None
    budget: float
    rate: float


# Rates and times of growth were chosen in the pilot.
CHOSEN = {"static 8": 1e-2, "static 14": 1e-2, "static 20": 1e-2, "grown 8 to 20": 1e-2}
GROW_AT = 0.3


def arms(rates: Mapping[str, float]) -> dict[str, Arm]:
    return {
        f"{name} at {budget:g}": Arm(blocks, GROW_AT if grows else None, budget, rates[name])
        for budget in (LOW, FULL)
        for name, blocks, grows in (
            ("grown 8 to 20", 1, True),
            ("static 8", 1, False),
            ("static 14", 2, False),
            ("static 20", 3, False),
        )
    }


def base() -> Task:
    return replace(
        find_task("cifar10_10k"),
        build=ResNet,
        slots=("stem",),
        weight_decay=1e-2,
        host_of_widths=None,
        shape=(),
        widths=(),
    )


def task_of(arm: Arm) -> Task:
    task = replace(base(), learning_rate=arm.rate, build=partial(ResNet, arm.blocks))
    if arm.at is None:
        return task
    return replace(task, build=ResNet, depth=Depth(STAGES, start=arm.blocks, when=arm.at))


def run(arm: Arm, key: int, data: DataSplits, full_cost: int, *, test: bool) -> dict[str, Any]:
    task = task_of(arm)
    rules = GrowthSettings(
        1,
        schedule=SCHEDULE,
        counterfactuals="none" if arm.at is None else "trial",
        max_train_macs=int(arm.budget * full_cost),
        keep_best=True,
    )
    task, rules = fit_to_budget(task, rules, data, host_size(task, data)[1])
    controller = StaticController() if arm.at is None else DepthController((arm.at,))
    (trained,) = play_run(task.recipe(data), [key], rules, controller, task=task.name)
    outcome = trained.outcome
    found = {
        "val_score": outcome.val_score,
        "params": outcome.params,
        "train_macs": outcome.train_macs,
        "steps": outcome.steps,
        "kept": len(outcome.seeds),
    }
    if test:
        found["test_score"] = task.score_on(trained.model, data.test_x, data.test_y)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--pilot", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, task = base().load(data_root()), base()
    cost = training_macs(task, data, host_size(task, data)[1], EPOCHS - 1)
    settings = {"epochs": EPOCHS, "width": WIDTH, "schedule": asdict(SCHEDULE), "cost": cost}
    if options.pilot:
        named = {
            f"{name} rate {rate:g}": arm
            for rate in RATES
            for name, arm in arms(dict.fromkeys(CHOSEN, rate)).items()
            if arm.budget == LOW
        }
        keys, path = range(PILOT_KEY, PILOT_KEY + 1), RESULTS / "depth-images-pilot.jsonl"
        column = "val_score"
    else:
        named, keys, path = arms(CHOSEN), range(options.keys), RESULTS / "depth-images.jsonl"
        column = "test_score"
    trials = run_missing(
        options.results or path,
        settings | {"arms": {name: asdict(arm) for name, arm in named.items()}},
        list(named),
        keys,
        lambda arm, key: run(named[arm], key, data, cost, test=not options.pilot),
    )
    table = means(trials, list(named), (column, "params", "train_macs", "cpu_seconds"))
    print_table({"arm": name, **row} for name, row in table.items())
    result: dict[str, Any] = {"arms": table}
    if not options.pilot:
        pairs = [(f"grown 8 to 20 at {LOW}", f"static 20 at {FULL:g}")]
        pairs += [
            (f"grown 8 to 20 at {share:g}", name)
            for share in (LOW, FULL)
            for name, arm in named.items()
            if arm.at is None and arm.budget == share
        ]
        result["comparisons"] = compare(trials, pairs, column)
        print_comparisons(result["comparisons"])
    print_json(result)


if __name__ == "__main__":
    main()
