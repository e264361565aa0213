"""Environment steps per second with 1 and with 2 workers.

    python benchmarks/workers.py [--envs 16] [--steps 15] [--rounds 3] [--workers 2] [--repeats 3]

Runs with one and with several workers take turns; both give the same bytes. The last line is one
JSON object with the medians of their speeds and of the ratio of each pair. The first round of a run
is left out: it waits for the processes to start. Needs as many idle cores as workers.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median

from esper.api.training import train_ppo
from esper.simic.training.config import load_config

GOAL = 1.7


def speed(folder: Path, workers: int, flags: dict[str, int]) -> float:
    """Environment steps per second of the rounds after the first."""
    train_ppo(load_config(flags=flags), folder, workers=workers)
    rows = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()][1:]
    return flags["envs"] * flags["steps"] * len(rows) / sum(row["seconds"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    flags = vars(parser.parse_args())
    workers, repeats = flags.pop("workers"), flags.pop("repeats")
    pairs, same = [], True
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            one, many = Path(name) / "one", Path(name) / "many"
            pairs.append((speed(one, 1, flags), speed(many, workers, flags)))
            print(f"1 worker {pairs[-1][0]:6.1f} steps/s, {workers} workers {pairs[-1][1]:6.1f}")
            same &= all(
                (one / file).read_bytes() == (many / file).read_bytes()
                for file in ("outcomes.jsonl", "metrics.jsonl", "events.jsonl")
            )
    speedup = median(many / one for one, many in pairs)
    slow, fast = (median(speeds) for speeds in zip(*pairs, strict=True))
    result = {
        "steps_per_second": {"1": round(slow, 2), str(workers): round(fast, 2)},
        "speedup": round(speedup, 3),
        "same_bytes": same,
        "load_average_of_the_machine": round(os.getloadavg()[0], 2),
        "goal": GOAL,
        "met": speedup >= GOAL,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
