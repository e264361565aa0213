"""Do fused hosts end where looped ones end?

    python benchmarks/fused_scores.py [--keys 50] [--first 0] [--controllers static heuristic]

Each key is trained twice on `digits`, once in each population, with the same first weights and the
same batches, and tested on the test part. Roundings differ, so that single runs drift apart like
any two; on average they must not. The last line is one JSON object: for each controller the mean
paired difference of test scores (fused minus looped, in points), its 95 % interval (BCa bootstrap)
and the half-width of that.
"""

import argparse
import json
from pathlib import Path

import torch

from esper.leyline.growth_settings import GrowthSettings
from esper.proof.statistics import paired_difference
from esper.tamiyo.controllers import make_controller
from esper.tolaria.engine.run import train
from esper.tolaria.fused.choice import PopulationKind
from esper.tolaria.tasks import find_task

HALF_WIDTH_GOAL = 0.2


def scores(controller: str, kind: PopulationKind, keys: range) -> list[float]:
    task = find_task("digits")
    data = task.load(Path("unused"))
    rules = GrowthSettings(task.steps, population=kind)
    who = make_controller(controller)
    trained = train(task.recipe(data), keys, rules, who, task=task.name, attribute=False)
    return [task.score_on(run.model, data.test_x, data.test_y) for run in trained]


def compare(controller: str, keys: range) -> dict[str, object]:
    fused, looped = (scores(controller, kind, keys) for kind in ("fused", "looped"))
    found = paired_difference(fused, looped)
    assert found.low is not None, "an interval needs several keys"
    assert found.high is not None
    half_width = (found.high - found.low) / 2
    return {
        "looped": round(sum(looped) / len(keys), 3),
        "fused": round(sum(fused) / len(keys), 3),
        "difference": round(found.mean, 3),
        "low": round(found.low, 3),
        "high": round(found.high, 3),
        "half_width": round(half_width, 3),
        "met": found.low <= 0.0 <= found.high and half_width < HALF_WIDTH_GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--controllers", nargs="+", default=["static", "scripted:early", "heuristic"]
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keys = range(arguments.first, arguments.first + arguments.keys)
    result: dict[str, object] = {"keys": len(keys), "first": keys[0]}
    for name in arguments.controllers:
        result[name] = compare(name, keys)
        print(f"{name:<16} {result[name]}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
