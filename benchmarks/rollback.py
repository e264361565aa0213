"""Does learning lose anything if a rollback restores the moments of Adam only roughly, or not?

    python benchmarks/rollback.py [digits|pydocs ...] [--keys 20]

A host is trained for some epochs, and goes on in three ways, with the same batches: with the
moments of AdamW that belong to its weights, with these rounded to bfloat16 (as after a rollback),
and with a new optimizer. The last line is one JSON object: for each task, and numbers of epochs
since, how much more the validation loss (nats) and the score are than with exact moments: the mean
over keys, and half of its 95 % interval.
"""

import argparse
import json

import numpy as np
import torch
from scipy import stats

from esper.growth.snapshot import Moments
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.tasks import find_task

# Epochs before and after.
EPOCHS = {"digits": (12, 12), "pydocs": (6, 6)}
WAYS: tuple[Moments, ...] = ("exact", "half", "none")
Figures = dict[str, dict[str, list[float]]]
SHOWN = (1, 2, 4, 6, 12)
ONE, ALL = np.array([0]), np.ones(1, dtype=bool)


def curves(recipe: HostRecipe, key: int, before: int, after: int) -> np.ndarray:
    """[3, after, 2]: loss and score after each epoch, for each of WAYS."""
    hosts = LoopedPopulation(recipe, [key])
    for step in range(before):
        hosts.train_epoch(ALL, step)
    found = []
    starts = [hosts.snapshot(ONE, moments=way) for way in WAYS]
    for start in starts:
        hosts.restore(ONE, start)
        for step in range(before, before + after):
            hosts.train_epoch(ALL, step)
            seen = hosts.evaluate(ONE, np.ones((1, len(hosts.template.sites)), dtype=bool))
            found.append((seen.loss[0], seen.score[0]))
    return np.array(found).reshape(len(WAYS), after, 2)


def compare(task: str, keys: int) -> dict[str, Figures]:
    known = find_task(task)
    recipe, epochs = known.recipe(known.load(data_root())), EPOCHS[task]
    exact, *others = np.stack([curves(recipe, key, *epochs) for key in range(keys)], axis=1)
    shown = [epoch for epoch in SHOWN if epoch <= epochs[1]]
    return {
        way: {str(epoch): difference(found[:, epoch - 1] - exact[:, epoch - 1]) for epoch in shown}
        for way, found in zip(WAYS[1:], others, strict=True)
    }


def difference(change: np.ndarray) -> dict[str, list[float]]:
    """Mean and half interval of both columns of [keys, 2]."""
    keys = len(change)
    half = stats.t.ppf(0.975, keys - 1) * change.std(axis=0, ddof=1) / np.sqrt(keys)
    pairs = zip(("loss", "score"), change.mean(axis=0), half, strict=True)
    return {name: [round(float(mean), 4), round(float(around), 4)] for name, mean, around in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=list(EPOCHS))
    parser.add_argument("--keys", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    for task in given.tasks:
        result[task] = compare(task, given.keys)
        print(task, result[task], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
