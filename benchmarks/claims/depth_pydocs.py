"""Claim G: does a transformer that grows from one layer to four pay?

    python benchmarks/claims/depth_pydocs.py [--keys 8] [--results FILE]
    python benchmarks/claims/depth_pydocs.py --second [--keys 8] [--results FILE]
    python benchmarks/claims/depth_pydocs.py --pilot RATE,RATE,... [--keys 1]

The protocol is in docs/claims.md. Finished trials are in the file of results; the script goes on
where it was stopped. The last line is one JSON object. `--second` asks whether another rate of the
static networks would change the answer, with trials in the same file. `--pilot` runs the arms at
every rate on keys that the final run does not use, on validation only.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import (
    RESULTS,
    Trials,
    compare,
    means,
    print_comparisons,
    print_json,
    print_table,
    run_missing,
)
from esper.growth.blueprints.modules import nearly_zero_
from esper.growth.hosts import TransformerHost
from esper.growth.sites import evaluating
from esper.leyline import BLUEPRINT, OP, SLOT, LifecycleOp
from esper.leyline.growth_settings import GrowthSettings, RateSchedule
from esper.tamiyo.controllers.simple import StaticController
from esper.tamiyo.situation import Controller, Situation, wait
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.data.text import load_pydocs, pydocs_text
from esper.tolaria.engine.run import play_run
from esper.tolaria.tasks import Task, find_task

CONTEXT = 64
WIDTH = 16
BATCH = 32
BATCHES = 24  # of an epoch: one step of the environment
VAL_EVERY = 3  # of the validation windows one in so many is used, as evaluations are on the bill
SCHEDULE = RateSchedule(warmup=0.02, decay=0.25)
FULL_BUDGET = 180 * 10**9  # multiply-adds of the whole run, evaluations included
SMALL_BUDGET = FULL_BUDGET * 3 // 4
GROW_AT = 0.35  # share of the budget that is spent when the layers come
BLUEPRINT_NAME = "transformer_blocks"
FIRST_PILOT_KEY = 1000


@dataclass(frozen=True)
class Arm:
    """`layers` at birth; `grows` to three more; all layers after the first are `calm` at birth,
    nearly the identity, like those that grow. Rate and birth were chosen in the pilot."""

    layers: int
    grows: bool
    budget: int
    rate: float
    calm: bool = False


# The last one decides nothing, and is run after all others.
ARMS = {
    "grown 1 to 4": Arm(1, True, SMALL_BUDGET, 1.6e-2),
    "static 1": Arm(1, False, SMALL_BUDGET, 1.6e-2),
    "static 2": Arm(2, False, SMALL_BUDGET, 1.6e-2, calm=True),
    "static 3": Arm(3, False, SMALL_BUDGET, 8e-3, calm=True),
    "static 4 full": Arm(4, False, FULL_BUDGET, 8e-3, calm=True),
    "static 4": Arm(4, False, SMALL_BUDGET, 8e-3, calm=True),
}
FAMILY = tuple(("grown 1 to 4", other) for other in list(ARMS)[1:])
# One key is little to choose a rate by: the arms that must be beaten, at the next best one.
SECOND = {
    f"{name} at {rate:g}": replace(ARMS[name], rate=rate)
    for name, rate in (("static 2", 8e-3), ("static 3", 1.6e-2), ("static 1", 8e-3))
}


class Deepen:
    """Grows blocks in the last slot once a share of the run is over, and keeps them as soon as that
    is legal."""

    name = "deepen"

    def __init__(self, at: float) -> None:
        self.at = at

    def reset(self, n_envs: int) -> None:
        pass

    def act(self, situation: Situation) -> np.ndarray:
        actions, last = wait(situation.n_envs), situation.table.shape[1] - 1
        legal = situation.masks.slot[:, :, last]
        empty = ~situation.table.holds_seed.any(axis=1)
        due = empty & legal[:, LifecycleOp.GERMINATE] & (situation.left <= 1.0 - self.at)
        for op, where in (
            (LifecycleOp.GERMINATE, due),
            (LifecycleOp.FOSSILIZE, legal[:, LifecycleOp.FOSSILIZE]),
        ):
            actions[where, OP], actions[where, SLOT] = op, last
        actions[due, BLUEPRINT] = situation.catalogue.index(BLUEPRINT_NAME)
        return actions


def load() -> DataSplits:
    data = load_pydocs(block_size=CONTEXT)
    return replace(data, val_x=data.val_x[::VAL_EVERY], val_y=data.val_y[::VAL_EVERY])


def host(layers: int, calm: bool) -> TransformerHost:
    made = TransformerHost(
        vocab=256,
        n_embd=WIDTH,
        n_head=4,
        n_layer=layers,
        block_size=CONTEXT,
        dropout=0.0,
    )
    for block in made.blocks[1:] if calm else ():
        nearly_zero_(block.proj)
        nearly_zero_(block.out)
    return made


def task_of(arm: Arm) -> Task:
    return replace(
        find_task("pydocs"),
        build=partial(host, arm.layers, arm.calm),
        slots=(f"blocks.{arm.layers - 1}",),
        batch=BATCH,
        batches_per_epoch=BATCHES,
        learning_rate=arm.rate,
    )


def run(arm: Arm, key: int, data: DataSplits, *, test: bool) -> dict[str, Any]:
    task = task_of(arm)
    rules = GrowthSettings(
        # More than the budget ever pays for: it is what ends a run.
        steps=300,
        incubation="joint",
        counterfactuals="trial" if arm.grows else "none",
        schedule=SCHEDULE,
        max_train_macs=arm.budget,
    )
    controller: Controller = Deepen(GROW_AT) if arm.grows else StaticController()
    (trained,) = play_run(task.recipe(data), [key], rules, controller, task=task.name)
    outcome = trained.outcome
    found = {
        "val_loss": outcome.val_loss,
        "val_score": outcome.val_score,
        "params": outcome.params,
        "train_macs": outcome.train_macs,
        "steps": outcome.steps,
        "germinated": outcome.germinated,
        "seeds": len(outcome.seeds),
    }
    if test:
        found |= test_results(task, trained.model, data)
    return found


def test_results(task: Task, model: torch.nn.Module, data: DataSplits) -> dict[str, float]:
    with evaluating(model):
        loss = float(task.loss(model(data.test_x), data.test_y))
    return {"test_loss": loss, "test_score": task.score_on(model, data.test_x, data.test_y)}


def settings() -> dict[str, Any]:
    text = pydocs_text()
    return {
        "text": {"length": len(text), "sha256": sha256(text).hexdigest()},
        "context": CONTEXT,
        "width": WIDTH,
        "batch": BATCH,
        "batches": BATCHES,
        "val_every": VAL_EVERY,
        "schedule": asdict(SCHEDULE),
        "grow_at": GROW_AT,
        "arms": {name: asdict(arm) for name, arm in ARMS.items()},
    }


def pilot(rates: Sequence[float], keys: int, results: Path, data: DataSplits) -> Mapping[str, Any]:
    """The arms with the smaller budget, at every rate; those of several layers with both births."""
    arms = {
        f"{name}{', calm' if calm else ''} at {rate:g}": replace(arm, rate=rate, calm=calm)
        for name, arm in ARMS.items()
        if arm.budget == SMALL_BUDGET
        for rate in rates
        for calm in ((False, True) if arm.layers > 1 else (False,))
    }
    first = FIRST_PILOT_KEY
    trials = run_missing(
        results,
        {**settings(), "arms": {name: asdict(arm) for name, arm in arms.items()}},
        list(arms),
        range(first, first + keys),
        lambda arm, key: run(arms[arm], key, data, test=False),
    )
    columns = ("val_loss", "val_score", "train_macs", "steps", "seeds", "cpu_seconds")
    table = means(trials, list(arms), columns)
    print_table({"arm": name, **row} for name, row in table.items())
    return table


def final(keys: int, results: Path, data: DataSplits) -> Mapping[str, Any]:
    trials = trials_of([list(ARMS)[:-1], list(ARMS)], keys, results, data)
    columns = ("test_loss", "test_score", "val_loss", "params", "train_macs", "seeds")
    table = means(trials, list(ARMS), (*columns, "cpu_seconds"))
    print_table({"arm": name, **row} for name, row in table.items())
    compared = compare(trials, FAMILY, "test_loss")
    print_comparisons(compared)
    return {"arms": table, "comparisons": compared}


def second(keys: int, results: Path, data: DataSplits) -> Mapping[str, Any]:
    """The same keys, static networks at their next best rate."""
    trials = trials_of([["grown 1 to 4"], *([name] for name in SECOND)], keys, results, data)
    compared = compare(trials, [("grown 1 to 4", name) for name in SECOND], "test_loss")
    print_comparisons(compared)
    return {"comparisons": compared}


def trials_of(
    stages: Sequence[Sequence[str]], keys: int, results: Path, data: DataSplits
) -> Trials:
    """The arms of one stage on all keys, then those of the next."""
    arms, trials = ARMS | SECOND, Trials()
    for stage in stages:
        trials |= run_missing(
            results,
            settings(),
            stage,
            range(keys),
            lambda arm, key: run(arms[arm], key, data, test=True),
        )
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=None)
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--second", action="store_true")
    parser.add_argument("--pilot", type=lambda text: [float(word) for word in text.split(",")])
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load()
    if options.pilot:
        results = options.results or RESULTS / "depth-pilot.jsonl"
        print_json(pilot(options.pilot, options.keys or 1, results, data))
    else:
        results = options.results or RESULTS / "depth.jsonl"
        play = second if options.second else final
        print_json(play(options.keys or 8, results, data))


if __name__ == "__main__":
    main()
