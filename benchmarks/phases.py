"""Where the time of a training round goes.

    python benchmarks/phases.py [--envs 4] [--rounds 2] [--steps 30]

The last line is one JSON object: the share of each phase on `digits`, and whether training and
evaluating hosts takes at least 90 % of a round.
"""

import argparse
import json
import tempfile
from pathlib import Path

from esper.api.training import train_ppo
from esper.simic.training.config import load_config
from esper.simic.training.round_log import PHASES

GOAL = 0.90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    config = load_config(flags=vars(arguments))
    with tempfile.TemporaryDirectory() as folder:
        train_ppo(config, Path(folder) / "run")
        lines = (Path(folder) / "run" / "timings.jsonl").read_text().splitlines()
    # The first round also warms up the libraries.
    rows = [json.loads(line) for line in lines][1 if len(lines) > 1 else 0 :]
    total = sum(row["seconds"] for row in rows)
    shares = {name: sum(row[f"seconds.{name}"] for row in rows) / total for name in PHASES}
    for name, share in shares.items():
        print(f"{name:<12}{share:7.2%}")
    result = {
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "other": round(1.0 - sum(shares.values()), 4),
        "env_steps_per_second": round(sum(r["steps_per_second"] for r in rows) / len(rows), 2),
        "goal": GOAL,
        "met": shares["hosts"] >= GOAL,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
