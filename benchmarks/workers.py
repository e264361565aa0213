"""Environment steps per second with 1 and with 2 workers.

    python benchmarks/workers.py [--envs 8] [--steps 10] [--rounds 3] [--workers 2]

Both runs give the same bytes; the last line is one JSON object with their speeds. The first round
of each is left out: it waits for the processes to start. Needs as many idle cores as workers.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

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
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    flags = vars(parser.parse_args())
    workers = flags.pop("workers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = speed(folder / "one", 1, flags)
        print(f"1 worker   {one:6.1f} steps/s")
        many = speed(folder / "many", workers, flags)
        print(f"{workers} workers  {many:6.1f} steps/s")
        same = all(
            (folder / "one" / file).read_bytes() == (folder / "many" / file).read_bytes()
            for file in ("outcomes.jsonl", "metrics.jsonl", "events.jsonl")
        )
    result = {
        "steps_per_second": {"1": round(one, 2), str(workers): round(many, 2)},
        "speedup": round(many / one, 3),
        "same_bytes": same,
        "load_average_of_the_machine": round(os.getloadavg()[0], 2),
        "goal": GOAL,
        "met": many / one >= GOAL,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
