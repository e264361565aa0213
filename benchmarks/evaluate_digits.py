"""What is growth worth on digits? All controllers that need no training, and their controls.

    python benchmarks/evaluate_digits.py [--keys 20] [--steps 30]

Every arm chooses its learning rate from the same grid on tuning keys; the controls are made for
the heuristic. The last line is one JSON object: the means of every arm and the comparisons.
"""

import argparse
import json
import sys
from dataclasses import asdict

import torch
from rich.console import Console

from esper.observatory.evaluation import arms_table, comparisons_table
from esper.proof import EvaluationSettings, evaluate
from esper.tamiyo.controllers import make_controller
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.tasks import find_task

ARMS = ("static", "random", "scripted:early", "heuristic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--steps", type=int, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = find_task("digits")
    settings = EvaluationSettings(ARMS, options.keys, options.steps, tune=True)

    def progress(phase: str, done: int, total: int) -> None:
        print(f"{phase} {done}/{total}", file=sys.stderr)

    report = evaluate(task, task.load(data_root()), settings, make_controller, progress)
    console = Console(width=100)
    console.print(arms_table(report.as_dict()))
    console.print(comparisons_table(report.as_dict()))
    print(
        json.dumps(
            {
                "keys": len(report.keys),
                "steps": report.steps,
                "learning_rates": report.learning_rates,
                "arms": report.arms,
                "comparisons": [asdict(comparison) for comparison in report.comparisons],
            }
        )
    )


if __name__ == "__main__":
    main()
