"""Does PPO learn to grow `digits`? The learning curve over training seeds.

    python benchmarks/learns.py [--seeds 5] [--rounds 200] [--envs 16] [--out runs/learns]
                                [--workers 2] [--config FILE.toml]

A run that is already there is taken up where it was left, so the benchmark can be interrupted. The
last line is one JSON object: return, score and size per tenth of each run, and how the last tenth
compares with the first, by a paired interval over seeds.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from esper.api.training import resume_ppo, train_ppo
from esper.simic.training.config import load_config
from esper.simic.training.loop import Hooks

CURVE = ("return", "val_score", "params", "germinated", "fossilized", "op_entropy")


def curve(run: Path, points: int) -> dict[str, list[float]]:
    """Means of each part of the run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rounds = [row for row in map(json.loads, lines) if row["kind"] == "round"]
    parts = np.array_split(np.arange(len(rounds)), min(points, len(rounds)))
    return {
        name: [round(float(np.mean([rounds[i][name] for i in part])), 4) for part in parts]
        for name in CURVE
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--config")
    parser.add_argument("--out", default="runs/learns")
    arguments = parser.parse_args()

    def show(number: int, row: dict, timing: dict) -> None:
        score = row["val_score"]
        print(f"round {number + 1}  return {row['return']:+.4f}  score {score:.2f}", flush=True)

    curves = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        run = Path(arguments.out) / f"seed-{seed}"
        flags = {"rounds": arguments.rounds, "envs": arguments.envs, "seed": seed}
        hooks = Hooks(on_round=show)
        if (run / "config.toml").is_file():
            resume_ppo(run, rounds=arguments.rounds, workers=arguments.workers, hooks=hooks)
        else:
            config = load_config(arguments.config, flags)
            train_ppo(config, run, workers=arguments.workers, hooks=hooks)
        curves.append(curve(run, 10))
        print(seed, curves[-1], flush=True)
    gains = np.array([c["return"][-1] - c["return"][0] for c in curves])
    error = float(gains.std(ddof=1) / len(gains) ** 0.5) if len(gains) > 1 else None
    result = {
        "rounds": arguments.rounds,
        "envs": arguments.envs,
        "curves": curves,
        "gain_in_return": round(float(gains.mean()), 4),
        "standard_error": None if error is None else round(error, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
