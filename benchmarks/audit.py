"""Bad seeds that were kept, with and without audits.

    python benchmarks/audit.py [--keys 6] [--every 5]

Digits. Every network begins with a kept seed in each slot that adds a wild function of its input:
noise that cannot be learned. The heuristic then grows the network, with `audit_every` and without.
Pairs have the same key. Prints one line of JSON: mean test scores, their paired difference with its
interval, seeds removed, and removals undone. About 1 CPU minute.
"""

import argparse
import json
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor, nn

from esper.growth.blueprints.catalogue import BlueprintCatalogue, BlueprintSpec, default_catalogue
from esper.leyline import History
from esper.leyline.events import RemovalUndone, SeedCulled
from esper.leyline.growth_settings import GrowthSettings
from esper.proof.statistics import paired_difference
from esper.tamiyo.controllers.heuristic import HeuristicController
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.run import play_run
from esper.tolaria.tasks import find_task


class Wild(nn.Module):
    """A fixed function that changes completely with a small change of its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(1000.0 * x) * self.scale.view(1, -1, 1, 1) + 0.0 * self.unused


def catalogue() -> BlueprintCatalogue:
    wild = BlueprintSpec("wild", "residual", {"cnn": Wild}, "noise")
    return BlueprintCatalogue((*default_catalogue().specs, wild))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keys", type=int, default=6)
    parser.add_argument("--every", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = find_task("digits")
    data, blueprints = task.load(data_root()), catalogue()
    recipe = task.recipe(data, blueprints)
    bad = tuple((slot, blueprints.index("wild")) for slot in range(len(task.slots)))
    plain = GrowthSettings(task.steps, schedule=task.schedule, topology=bad)
    arms = {"without": plain, "with": replace(plain, audit_every=arguments.every)}
    scores: dict[str, list[float]] = {name: [] for name in arms}
    history = History()
    for key in range(arguments.keys):
        for name, settings in arms.items():
            controller = HeuristicController()
            (trained,) = play_run(recipe, [key], settings, controller, history, task="digits")
            scores[name].append(task.score_on(trained.model, data.test_x, data.test_y))
            print(f"key {key}, {name} audits: {scores[name][-1]:.2f}", flush=True)
    gap = paired_difference(scores["with"], scores["without"])
    removed = [e for e in history.events if isinstance(e, SeedCulled) and e.reason == "audit"]
    undone = [e for e in history.events if isinstance(e, RemovalUndone)]
    found = {"keys": arguments.keys, **{name: fmean(own) for name, own in scores.items()}}
    found |= {"gain": gap.mean, "low": gap.low, "high": gap.high, "p": gap.p}
    print(json.dumps({**found, "removed": len(removed), "undone": len(undone)}))


if __name__ == "__main__":
    main()
