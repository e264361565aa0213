"""Does PPO learn to grow `digits`? The learning curve over training keys, and what it is worth.

    python benchmarks/learns.py [--keys 5] [--rounds 200] [--envs 16] [--out runs/learns]
                                [--workers 2] [--config FILE.toml] [--teacher heuristic]

With `--teacher` every run starts from a clone of its own, made of 64 episodes of the teacher. A run
that is already there is taken up where it was left, so the benchmark can be interrupted. What the
policies are worth on other keys and on test data `esper evaluate --arms ...,runs/learns/key-0,...`
says. The last line is one JSON object: objective, score and size per tenth of each run, and how the
last tenth compares with the first. The objective is the final score minus costs: the return plus
the score before the first decision, which is luck.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

from esper.api import imitate
from esper.api.training import resume_ppo, train_ppo
from esper.proof.statistics import paired_difference
from esper.simic.training.checkpoint import is_run
from esper.simic.training.config import load_config
from esper.simic.training.loop import Hooks

CURVE = ("objective", "val_score", "params", "germinated", "fossilized", "op_entropy")
PANELS = {
    "objective": "final score minus costs",
    "val_score": "validation score, %",
    "params": "parameters",
}


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """The rows of the rounds, with their objective."""
    rounds, starts = [], []
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if row["kind"] == "step" and row["step"] == 0:
            starts.append(row["val_score"])
        elif row["kind"] == "round":
            rounds.append(row | {"objective": row["return"] + float(np.mean(starts)) / 100})
            starts = []
    return rounds


def curve(rounds: list[dict[str, Any]], points: int) -> dict[str, list[float]]:
    """Means of each part of a run."""
    parts = np.array_split(np.arange(len(rounds)), min(points, len(rounds)))
    return {
        name: [round(float(np.mean([rounds[i][name] for i in part])), 4) for part in parts]
        for name in CURVE
    }


def clone_of(teacher: str, out: Path, key: int) -> Path:
    folder = out / f"clone-{key}"
    if not is_run(folder):
        imitate(teacher, key=key, out=folder, overwrite=True)
    return folder


def train(options: argparse.Namespace, key: int) -> Path:
    run = Path(options.out) / f"key-{key}"

    def show(number: int, row: dict, timing: dict) -> None:
        score = row["val_score"]
        print(f"round {number + 1}  return {row['return']:+.4f}  score {score:.2f}", flush=True)

    hooks = Hooks(on_round=show)
    if (run / "config.toml").is_file():
        resume_ppo(run, rounds=options.rounds, workers=options.workers, hooks=hooks)
    else:
        flags = {"rounds": options.rounds, "envs": options.envs, "key": key}
        if options.teacher:
            flags["warm_start"] = str(clone_of(options.teacher, Path(options.out), key))
        train_ppo(load_config(options.config, flags), run, workers=options.workers, hooks=hooks)
    return run


def paint(runs: list[Path], path: Path) -> None:
    """Three means over rounds: a thin line for each training key, their mean thick."""
    found = [rounds_of(run) for run in runs]
    episodes = np.cumsum([row["episodes"] for row in found[0]])
    width = max(1, len(episodes) // 8)
    window = np.ones(width) / width
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
        values = np.array([[row[name] for row in rounds] for rounds in found])
        smooth = np.array([np.convolve(row, window, mode="valid") for row in values])
        axis.plot(episodes[width - 1 :], smooth.T, color="0.75", linewidth=0.8)
        axis.plot(episodes[width - 1 :], smooth.mean(axis=0), color="tab:green", linewidth=2)
        axis.set(xlabel=f"episodes (means of {width} rounds)", title=label)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--first-key", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--config")
    parser.add_argument("--teacher")
    parser.add_argument("--out", default="runs/learns")
    options = parser.parse_args()
    keys = range(options.first_key, options.first_key + options.keys)
    runs = [train(options, key) for key in keys]
    curves = [curve(rounds_of(run), 10) for run in runs]
    for key, found in zip(keys, curves, strict=True):
        print(key, found, flush=True)
    paint(runs, Path(options.out) / "learning.png")
    gains = {}
    for name in ("objective", "val_score", "params"):
        last, first = ([c[name][at] for c in curves] for at in (-1, 0))
        gains[name] = asdict(paired_difference(last, first))
    print(
        json.dumps(
            {
                "rounds": options.rounds,
                "envs": options.envs,
                "curves": curves,
                "gains": gains,
            }
        )
    )


if __name__ == "__main__":
    main()
