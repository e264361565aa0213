"""Trials of candidates: what they cost, how many steps keep their ranking, what they find.

    python benchmarks/trials.py [--part cost steps bottleneck] [--keys 20]

cost        nine candidates (three slots, three blueprints) of a `digits` host, CPU time as a
            share of an epoch's (training and validation), medians; one host in the loop, and 32
            fused ones
steps       rank correlation (Spearman) of the candidates' gains with those of 36 steps of 64 (mean
            of 8 trials), mean over keys, and how much of the best gain there the choice has, for
            hosts after 10 and after 30 epochs
bottleneck  in how many keys the candidate that relieves the one narrow block of a host ranks first

The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from esper.growth import CNNHost
from esper.tamiyo import TrialPlan
from esper.tolaria import FusedPopulation, LoopedPopulation, Task, find_task

GOAL = 0.15
THREE = ("branch", "conv_light", "widen_double")
REFERENCE = {"steps": 36, "batch": 64}
GRID = [(k, batch) for batch in (16, 32, 64) for k in (4, 8, 12, 36)]


def hosts(task: Task, kind: Any, keys: range, epochs: int) -> Any:
    population = kind(task.recipe(task.load(Path("unused"))), keys)
    for step in range(epochs):
        population.train_epoch(np.ones(len(keys), dtype=bool), step)
    return population


def candidates(population: Any, names: tuple[str, ...]) -> np.ndarray:
    """bool[E, S, B]: those of the blueprints that fit, everywhere."""
    from esper.growth import seed_costs

    template = population.template
    fits, _, _ = seed_costs(template.catalogue, template.sites, template.output)
    listed = np.isin(template.catalogue.names, names)
    return np.broadcast_to(fits & listed, (len(population.keys), *fits.shape)).copy()


def timed(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def cost(task: Task) -> dict[str, float]:
    found = {}
    for name, kind, n in (("looped", LoopedPopulation, 1), ("fused_32", FusedPopulation, 32)):
        population = hosts(task, kind, range(n), 2)
        everyone, envs = np.ones(n, dtype=bool), np.arange(n)
        plan, tried = TrialPlan(THREE), candidates(population, THREE)
        present = np.ones((n, len(population.template.sites)), dtype=bool)

        def epoch() -> None:
            population.train_epoch(everyone, 3)  # noqa: B023
            population.evaluate(envs, present)  # noqa: B023

        def trials() -> None:
            population.try_candidates(tried, plan, 3)  # noqa: B023

        trials()
        pairs = [(timed(trials), timed(epoch)) for _ in range(11)]
        found[name] = median(a / b for a, b in pairs)
        found[f"{name}_ms"] = 1000 * median(a for a, _ in pairs)
        print(f"{name}: {tried[0].sum()} candidates, {found[name]:.3f} of an epoch")
    return found


def ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort().argsort().astype(float)


def steps(task: Task, keys: int) -> dict[str, Any]:
    names, found = ("branch", "conv_light", "conv_heavy", "depthwise", *THREE), {}
    for epochs in (10, 30):
        population = hosts(task, FusedPopulation, range(keys), epochs)
        tried = candidates(population, names)

        def gains(step: int, **settings: int) -> np.ndarray:
            plan = TrialPlan(names, **settings)
            read = population.try_candidates(tried, plan, step)  # noqa: B023
            return read.gain[tried].reshape(keys, -1)  # noqa: B023

        # Other newborns and other batches than those that are judged; chance is averaged out.
        reference = np.mean([gains(1000 + i, **REFERENCE) for i in range(8)], axis=0)
        oracle = reference.max(axis=1)
        for k, batch in GRID:
            seconds = time.process_time()
            gain = gains(epochs, steps=k, batch=batch)
            seconds = time.process_time() - seconds
            rho = np.mean(
                [
                    np.corrcoef(ranks(a), ranks(b))[0, 1]
                    for a, b in zip(gain, reference, strict=True)
                ]
            )
            chosen = reference[np.arange(keys), gain.argmax(axis=1)]
            row = [round(float(x), 3) for x in (rho, chosen.mean() / oracle.mean(), seconds)]
            found[f"{epochs} epochs, {k} steps of {batch}"] = row
            print(f"{epochs} epochs, {k:2} steps of {batch}: rho {row[0]}, gain kept {row[1]}")
    return found


def bottleneck(task: Task, keys: int) -> dict[str, int]:
    """Blocks of 8 channels but one, which has one: the seed that relieves it adds to what follows
    the narrow block, from what comes before it. The last block cannot be the narrow one: a norm
    of a single number is none."""
    found = {}
    for narrow in range(2):
        widths = tuple(1 if i == narrow else 8 for i in range(3))
        made = replace(task, build=partial(CNNHost, widths=widths, in_channels=1))
        population = hosts(made, FusedPopulation, range(keys), 15)
        tried = candidates(population, THREE)
        gain = population.try_candidates(tried, TrialPlan(THREE), 15).gain
        gain = np.where(np.isnan(gain), -np.inf, gain)
        best = [np.unravel_index(g.argmax(), g.shape) for g in gain]
        names = population.template.catalogue.names
        chosen = [f"{names[b]} in {s}" for s, b in best]
        for each in sorted(set(chosen)):
            print(f"narrow {narrow}: {each} in {chosen.count(each)} of {keys}")
            found[f"narrow {narrow}: {each}"] = chosen.count(each)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="*", default=["cost", "steps", "bottleneck"])
    parser.add_argument("--keys", type=int, default=20)
    asked = parser.parse_args()
    task, result = find_task("digits"), {}
    if "steps" in asked.part:
        result["steps"] = steps(task, asked.keys)
    if "bottleneck" in asked.part:
        result["bottleneck"] = bottleneck(task, asked.keys)
    if "cost" in asked.part:
        result["cost"] = cost(task)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
