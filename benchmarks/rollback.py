"""Does learning lose anything if a rollback restores the weights and resets the optimizer?

    python benchmarks/rollback.py [digits|pydocs ...] [--keys 20]

A host is trained for some epochs, and goes on in two ways, with the same batches: with the moments
of AdamW that belong to its weights, and with a new optimizer. The last line is one JSON object: for
each task, and numbers of epochs since, the mean difference of validation loss (nats) and score (new
minus kept) over keys, with half of its 95 % interval.
"""

import argparse
import json

import numpy as np
import torch
from scipy import stats

from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.tasks import find_task

# Epochs before and after.
EPOCHS = {"digits": (12, 12), "pydocs": (6, 6)}
SHOWN = (1, 2, 4, 6, 12)
ONE, ALL = np.array([0]), np.ones(1, dtype=bool)


def curves(recipe: HostRecipe, key: int, before: int, after: int) -> np.ndarray:
    """[2, after, 2]: loss and score after each epoch, with kept and with new moments."""
    hosts = LoopedPopulation(recipe, [key])
    for step in range(before):
        hosts.train_epoch(ALL, step)
    found = []
    starts = [hosts.snapshot(ONE, moments=moments) for moments in (True, False)]
    for start in starts:
        hosts.restore(ONE, start)
        for step in range(before, before + after):
            hosts.train_epoch(ALL, step)
            seen = hosts.evaluate(ONE, np.ones((1, len(hosts.template.sites)), dtype=bool))
            found.append((seen.loss[0], seen.score[0]))
    return np.array(found).reshape(2, after, 2)


def compare(task: str, keys: int) -> dict[str, dict[str, list[float]]]:
    known = find_task(task)
    recipe, epochs = known.recipe(known.load(data_root())), EPOCHS[task]
    kept, new = np.stack([curves(recipe, key, *epochs) for key in range(keys)], axis=1)
    change = new - kept
    half = stats.t.ppf(0.975, keys - 1) * change.std(axis=0, ddof=1) / np.sqrt(keys)
    return {
        str(epoch): {
            name: [round(float(values[epoch - 1, column]), 4) for values in (change.mean(0), half)]
            for column, name in enumerate(("loss", "score"))
        }
        for epoch in SHOWN
        if epoch <= epochs[1]
    }


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
