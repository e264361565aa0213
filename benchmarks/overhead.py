"""What growth costs before anything has grown.

    python benchmarks/overhead.py [--repeats 15]

1. Training steps of a bare model against the same model wrapped, nothing grown.
2. An epoch of LoopedPopulation without seeds against a loop over the same modules by hand.
3. Memory of the bookkeeping (wrapper, slots, slot table) against the model's parameters.

Times are medians of CPU time over runs that alternate within one process; only ratios are claimed.
"""

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.hosts import CNNHost
from esper.growth.slot_table import SlotTable
from esper.leyline import draw_key
from esper.tolaria.engine.objectives import accuracy
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.tasks import find_task


def interleaved(arms: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each arm; the arms take turns, and the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, run in arms.items():
            started = time.process_time()
            run()
            if turn > 0:
                times[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def train_steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def wrapped_against_bare(repeats: int) -> float:
    with keyed(0):
        x, y = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
        bare, inner = CNNHost(base_channels=8), CNNHost(base_channels=8)
    wrapped = GrownModule.wrap(inner, inner.slot_modules, x[:2])
    seconds = interleaved(
        {
            "bare": lambda: train_steps(bare, x, y, 10),
            "wrapped": lambda: train_steps(wrapped, x, y, 10),
        },
        repeats,
    )
    return seconds["wrapped"] / seconds["bare"]


def population_against_hand(repeats: int, hosts: int = 4) -> float:
    task = find_task("digits")
    data = task.load(Path("data"))
    population = LoopedPopulation(task.recipe(data, default_catalogue()), range(hosts))
    models = []
    for key in range(hosts):
        with keyed(draw_key(key, "host")):
            model = task.build()
        models.append((model, task.optimizer(model.parameters())))

    def by_hand() -> None:
        for model, optimizer in models:
            model.train()
            total = torch.zeros(2)
            for rows in torch.randperm(len(data.train_x)).split(task.batch):
                x, y = data.train_x[rows], data.train_y[rows]
                optimizer.zero_grad(set_to_none=True)
                output = model(x)
                loss = nn.functional.cross_entropy(output, y)
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    total += torch.stack([loss.detach(), accuracy(output, y)]) * len(y)
            total.tolist()

    running = np.ones(hosts, dtype=bool)
    seconds = interleaved(
        {"hand": by_hand, "population": lambda: population.train_epoch(running, 0) and None},
        repeats,
    )
    return seconds["population"] / seconds["hand"]


def bookkeeping_share() -> float:
    """For a network of 1.5 million parameters with five slots."""
    host = CNNHost(base_channels=32, n_blocks=5)
    x = torch.zeros(2, 3, 32, 32)
    GrownModule.wrap(host, host.slot_modules, x)
    gc.collect()
    tracemalloc.start()
    kept = (GrownModule.wrap(host, host.slot_modules, x), SlotTable.empty(1, 5))
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == 2
    return used / sum(p.numel() * p.element_size() for p in host.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    figures = {
        "wrapped_over_bare": wrapped_against_bare(repeats),
        "population_over_hand_written_loop": population_against_hand(repeats),
        "bookkeeping_share_of_model_memory": bookkeeping_share(),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
