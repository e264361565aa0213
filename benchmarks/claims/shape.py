"""Claim F: a shape that was grown under a cap and trained anew beats the best uniform width and
random shapes, all with the compute of search and training together.

    python benchmarks/claims/shape.py

On `digits`. The learning rate is the task's in every arm. Width and random shape are chosen on
validation data of tuning keys; test data are read of the networks of the evaluation keys only.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median

import torch

from common import (
    RESULTS,
    Row,
    Trials,
    append,
    compare,
    finished,
    means,
    print_json,
    print_table,
)
from esper.proof.arms import Plan, affordable_steps, host_size, static_plan, train
from esper.proof.shapes import Shape, of_shape, random_shapes, shape_within
from esper.tamiyo import HeuristicController
from esper.tolaria import Budget, DataSplits, Task, Trained, TrialRules, data_root, find_task

CAP = 1_200  # parameters
BUDGET = Budget(params=CAP)
KEYS, TUNING_KEYS = range(500, 520), range(1_000_000, 1_000_008)
RANDOM_SHAPES = 8
GROWN, ANEW = "grown", "found, anew"
UNIFORM, RANDOM = "best uniform", "best random shape"
ARMS = (GROWN, ANEW, UNIFORM, RANDOM)


def always(plan: Plan) -> Callable[[int], Plan]:
    return lambda key: plan


class Bench:
    """Trials by arm and key, those that are on disk and those that are run now."""

    def __init__(self, task: Task, data: DataSplits, path: Path, steps: int) -> None:
        self.task, self.data, self.path, self.steps = task, data, path, steps
        self.settings = {"task": task.name, "cap": CAP, "steps": steps, "rate": task.learning_rate}
        self.trials: Trials = finished(path, self.settings)
        # Made once: two tasks of the same shape would not be equal, nor trained side by side.
        self.of_shape: Callable[[Shape], Task] = cache(lambda widths: of_shape(task, widths))

    def run(
        self, arm: str, keys: Sequence[int], plan: Callable[[int], Plan], *, test: bool
    ) -> list[Row]:
        """The rows of an arm for all keys; `plan(key)` says how its network is trained."""
        missing = [key for key in keys if (arm, key) not in self.trials]
        if missing:
            plans = [plan(key) for key in missing]
            trained = self._trained(plans, missing)
            rows = [
                {"arm": arm, **self.row(own.task, each, test), "settings": self.settings}
                for own, each in zip(plans, trained, strict=True)
            ]
            append(self.path, rows)
            self.trials |= {(arm, row["key"]): row for row in rows}
            print(arm, [round(row["val"], 1) for row in rows], flush=True)
        return [self.trials[arm, key] for key in keys]

    def _trained(self, plans: Sequence[Plan], keys: Sequence[int]) -> list[Trained]:
        """Each key by its own plan; keys with the same plan side by side."""
        found: dict[int, Trained] = {}
        for key, plan in zip(keys, plans, strict=True):
            if key not in found:
                own = [k for k, its_plan in zip(keys, plans, strict=True) if its_plan == plan]
                found |= zip(own, train(plan, self.data, own), strict=True)
        return [found[key] for key in keys]

    def row(self, task: Task, trained: Trained, test: bool) -> Row:
        outcome, data = trained.outcome, self.data
        score = task.score_on(trained.model, data.test_x, data.test_y) if test else None
        return {
            "key": outcome.key,
            "test": score,
            "val": outcome.val_score,
            "params": outcome.params,
            "macs": outcome.train_macs,
            "steps": outcome.steps,
            "widths": list(task.shape),
            "topology": [list(seed) for seed in trained.topology],
            "seeds": [f"{seed.blueprint}@{seed.module}" for seed in outcome.seeds],
        }

    def search(self, keys: Sequence[int], *, test: bool) -> None:
        """Grow, and train what was found anew."""
        rules = TrialRules(
            self.steps,
            budget=BUDGET,
            population="fused",
            schedule=self.task.schedule,
        )
        grow = Plan(self.task, HeuristicController(), rules)
        self.run(GROWN, keys, always(grow), test=test)
        self.run(ANEW, keys, self.anew, test=test)

    def anew(self, key: int) -> Plan:
        topology = tuple((slot, seed) for slot, seed in self.trials[GROWN, key]["topology"])
        widths, seeds = shape_within(self.task, self.data, topology, BUDGET)
        return static_plan(self.of_shape(widths), self.steps, seeds, "fused")

    def control(self, widths: Shape, keys: Sequence[int]) -> Plan:
        """A static network with all that search and training cost on these keys, in the mean: so
        they are trained side by side."""
        task = self.of_shape(widths)
        macs = host_size(task, self.data)[1]
        budget = fmean(self.trials[arm, key]["macs"] for arm in (GROWN, ANEW) for key in keys)
        steps = affordable_steps(task, self.data, macs, int(2 * budget))
        return static_plan(task, steps, population="fused")

    def choose(self, name: str, shapes: Sequence[Shape], keys: Sequence[int]) -> Shape:
        """The best on validation."""
        scores = {}
        for widths in shapes:
            plan = self.control(widths, keys)
            rows = self.run(f"{name} {widths}", keys, always(plan), test=False)
            scores[widths] = fmean(row["val"] for row in rows)
        return max(scores, key=scores.__getitem__)


def uniform_shapes(task: Task, data: DataSplits) -> list[Shape]:
    """The task's own shape, narrower and wider, as far as the cap allows."""
    shapes = [tuple(width * own // task.shape[0] for own in task.shape) for width in task.widths]
    return [widths for widths in shapes if host_size(of_shape(task, widths), data)[0] <= CAP]


def drawn_shapes(bench: Bench, keys: Sequence[int]) -> list[Shape]:
    """Of the size that is found on the tuning keys, none above the cap."""
    task = bench.task
    assert task.host_of_widths is not None
    size = median(bench.trials[ANEW, key]["params"] for key in keys)
    drawn = random_shapes(task.host_of_widths, task.shape, size, 4 * RANDOM_SHAPES)
    fit = [widths for widths in drawn if host_size(of_shape(task, widths), bench.data)[0] <= CAP]
    return fit[:RANDOM_SHAPES]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=len(KEYS), help="only the first so many")
    parser.add_argument("--tuning-keys", type=int, default=len(TUNING_KEYS), help="likewise")
    parser.add_argument("--steps", type=int, default=None, help="epochs of growth")
    parser.add_argument("--results", type=Path, default=RESULTS / "shape.jsonl")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    task = find_task("digits")
    data = task.load(data_root())
    bench = Bench(task, data, asked.results, asked.steps or task.steps)
    tuning, keys = TUNING_KEYS[: asked.tuning_keys], KEYS[: asked.keys]
    bench.search(tuning, test=False)
    chosen = {
        UNIFORM: bench.choose("uniform", uniform_shapes(task, data), tuning),
        RANDOM: bench.choose("random", drawn_shapes(bench, tuning), tuning),
    }
    bench.search(keys, test=True)
    for arm, widths in chosen.items():
        bench.run(arm, keys, always(bench.control(widths, keys)), test=True)
    report(bench, chosen, keys)


def report(bench: Bench, chosen: dict[str, Shape], keys: Sequence[int]) -> None:
    trials = {(arm, key): bench.trials[arm, key] for arm in ARMS for key in keys}
    table = means(trials, ARMS, ("test", "params", "macs", "steps"))
    print_table({"arm": arm, **row} for arm, row in table.items())
    pairs = [(ANEW, UNIFORM), (ANEW, RANDOM), (ANEW, GROWN)]
    differences = compare(trials, pairs, "test")
    print_table(differences)
    shapes = {arm: list(widths) for arm, widths in chosen.items()}
    print_json({"n": len(keys), "chosen": shapes, "means": table, "differences": differences})


if __name__ == "__main__":
    main()
