"""Is advice right? Train hosts, ask, then do all three things that could have been advised.

    python benchmarks/advice.py --keys 20

Continue, grow (by the heuristic) and retrain wider (twice the width, from scratch) have the same
extra budget in multiply-adds; what the advice itself cost is shown, and is not taken off. Advice is
right if what it says ends best on test data, or within 0.5 points of the best.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from esper.growth import CNNHost, MLPHost
from esper.leyline.constants import COOLING_SAMPLES
from esper.proof.arms import first_epoch_macs, host_plan, host_size, paced
from esper.proof.arms import train as train_plan
from esper.tamiyo import Controller, HeuristicController, StaticController
from esper.tolaria import (
    RESCUE,
    Advice,
    DataSplits,
    Task,
    Trained,
    advise,
    data_root,
    find_task,
    train,
)
from esper.tolaria.tasks.base import block_slots

FIRST_KEY = 11_000
WITHIN = 0.5  # points
LEAST_DECISIONS = 6  # epochs that a growing network has at least, shorter ones if need be
CONTINUE, GROW, RETRAIN = OPTIONS = ("continue", "grow", "retrain wider")


@dataclass(frozen=True)
class Case:
    """A host to ask about, and its like of twice the width."""

    name: str
    task: Task
    wider: Task


def cases() -> list[Case]:
    base = find_task("digits")
    cnn = partial(CNNHost, num_classes=10, in_channels=1)
    wide_cnn = replace(base, build=partial(cnn, widths=(4, 8, 16)))
    mlp = replace(base, build=partial(MLPHost, 64, hidden=6), slots=block_slots(2))
    wide_mlp = replace(mlp, build=partial(MLPHost, 64, hidden=12))
    return [
        Case("CNN, 101 epochs", replace(base, steps=100), wide_cnn),
        Case("CNN, 11 epochs", replace(base, steps=10), wide_cnn),
        Case("MLP, 31 epochs", mlp, wide_mlp),
    ]


def score(task: Task, data: DataSplits, networks: Sequence[Trained]) -> list[float]:
    return [task.score_on(each.model, data.test_x, data.test_y) for each in networks]


def spend(
    task: Task,
    data: DataSplits,
    keys: Sequence[int],
    budget: int,
    controller: Controller,
    weights: Mapping[int, Any] | None,
) -> list[float]:
    """Test scores of what the budget makes of trained hosts, or of new ones."""
    trained, grows = weights is not None, not isinstance(controller, StaticController)
    macs = host_size(task, data)[1]
    budget = max(budget, first_epoch_macs(task, data, macs, trained=trained))
    paced_task, epochs = paced(
        task,
        data,
        macs,
        budget,
        trained=trained,
        least=LEAST_DECISIONS if grows else 1,
        beside=COOLING_SAMPLES if trained else 0,
    )
    rules = replace(
        RESCUE,
        steps=max(1, epochs if trained else epochs - 1),
        start="trained" if trained else "fresh",
        cooling=trained,
        counterfactuals=grows,
        population="fused",
        max_macs=budget,
    )
    recipe = replace(paced_task.recipe(data), weights=weights)
    return score(
        task, data, train(recipe, keys, rules, controller, task=task.name, attribute=False)
    )


def measure(case: Case, data: DataSplits, keys: Sequence[int], extra: float) -> dict[str, Any]:
    task, recipe = case.task, case.task.recipe(data)
    hosts = train_plan(host_plan(task, task.steps, "fused"), data, keys)
    weights = {host.outcome.key: host.model.state_dict() for host in hosts}
    recipe = replace(recipe, weights=weights)
    advice = [advise(recipe, key, extra=extra, epochs=task.steps + 1) for key in keys]
    budget = int(extra * hosts[0].outcome.train_macs)
    found = {
        CONTINUE: spend(task, data, keys, budget, StaticController(), weights),
        GROW: spend(task, data, keys, budget, HeuristicController(), weights),
        RETRAIN: spend(case.wider, data, keys, budget, StaticController(), None),
    }
    return {"case": case.name, "extra": extra, "host": fmean(score(task, data, hosts))} | summary(
        advice, found
    )


def summary(advice: Sequence[Advice], found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """`found` has the test scores of every option, by key."""
    advised = [found[each.verdict][i] for i, each in enumerate(advice)]
    best = [max(scores) for scores in zip(*found.values(), strict=True)]
    return {
        "keys": len(advice),
        "rho": fmean(each.findings.rho or 0.0 for each in advice),
        "plateaued": sum(each.findings.plateaued for each in advice),
        "verdicts": dict(Counter(each.verdict for each in advice)),
        "right": sum(own >= top - WITHIN for own, top in zip(advised, best, strict=True)),
        "advised": fmean(advised),
        **{f"always {name}": fmean(found[name]) for name in OPTIONS},
        "best in hindsight": fmean(best),
        "share": fmean(each.share for each in advice),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--extra", default="0.3,1.0")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = find_task("digits").load(data_root())
    keys = range(FIRST_KEY, FIRST_KEY + given.keys)
    results = []
    for case in cases():
        for extra in map(float, given.extra.split(",")):
            results.append(measure(case, data, list(keys), extra))
            for name, value in results[-1].items():
                print(
                    f"{name:<22} {value:.2f}" if isinstance(value, float) else f"{name:<22} {value}"
                )
            print(flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
