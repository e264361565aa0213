"""Memory of training: linear in environments, constant over rounds.

    python benchmarks/memory.py [--steps 3] [--rounds 12] [--envs 2 4 8]
    python benchmarks/memory.py --load           64 environments x 150 steps on 2 workers
    python benchmarks/memory.py --rounds 100     the drift over 100 rounds
    python benchmarks/memory.py --population looped      one host after another

Each size runs in a process of its own, with the real digits. The last line is one JSON object: the
resident memory after each size, how far it is from a straight line, and its drift over rounds from
the tenth part of the run on.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np

from esper.api.training import train_ppo
from esper.simic.training.config import load_config
from esper.simic.training.loop import Hooks

DRIFT_GOAL = 0.02


def _measure(flags: dict, workers: int, pipe) -> None:
    seen: list[float] = []
    hooks = Hooks(on_round=lambda number, row, timing: seen.append(timing["memory_mb"]))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        train_ppo(load_config(flags=flags), Path(folder) / "run", workers=workers, hooks=hooks)
        outcomes = (Path(folder) / "run" / "outcomes.jsonl").read_text().count("\n")
    pipe.send({"mb": seen, "seconds": time.perf_counter() - began, "outcomes": outcomes})


def measure(workers: int = 1, **flags: object) -> dict:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(flags, workers, theirs))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--population", choices=("fused", "looped"), default="fused")
    arguments = parser.parse_args()
    how = {"population": arguments.population}
    if arguments.load:
        result = measure(workers=2, envs=64, steps=150, rounds=1, **how)
        print(json.dumps({"load": result, "completes": result["outcomes"] == 64}))
        return
    sizes = {}
    for envs in arguments.envs[:-1]:
        sizes[envs] = measure(envs=envs, steps=arguments.steps, rounds=2, **how)["mb"][-1]
        print(f"{envs:>4} environments  {sizes[envs]:8.1f} MB")
    last = arguments.envs[-1]
    long = measure(envs=last, steps=arguments.steps, rounds=arguments.rounds, **how)["mb"]
    sizes[last] = long[1]
    print(f"{last:>4} environments  {sizes[last]:8.1f} MB, then {long[-1]:.1f} MB")
    x, y = np.array(list(sizes)), np.array(list(sizes.values()))
    slope, base = np.polyfit(x, y, 1)
    warm = long[max(1, len(long) // 10) :]
    drift = (warm[-1] - warm[0]) / warm[0]
    bend = np.abs(y - base - slope * x).max() / y.max()
    result = {
        "mb": {str(envs): round(mb, 1) for envs, mb in sizes.items()},
        "mb_per_env": round(float(slope), 3),
        "largest_distance_from_a_line": round(float(bend), 4),
        "rounds": len(long),
        "drift": round(float(drift), 4),
        "goal": DRIFT_GOAL,
        "met": bool(abs(drift) < DRIFT_GOAL),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
