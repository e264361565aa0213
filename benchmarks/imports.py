"""How long `import esper` and `esper --help` take, beside an earlier commit.

    python benchmarks/imports.py [BASELINE] [--repeats 15]

BASELINE is a commit; the default is the last one without modules for other people's libraries. Both
take turns, each in a process of its own, after one that nobody counts. Times are CPU seconds of the
process, so that what else the machine does matters little. The last line is one JSON object with
medians and the ratio of the medians to those of the baseline.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
BEFORE_INTEGRATIONS = "1cca2da^"
WAYS = {
    "import esper": ["-c", "import esper"],
    "esper --help": ["-m", "esper", "--help"],
}


def cpu_seconds(source: Path, words: list[str]) -> float:
    """Of one process that finds Esper in `source`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, *words], env=env, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(sources: dict[str, Path], repeats: int) -> dict[str, dict[str, float]]:
    found = {}
    for way, words in WAYS.items():
        times: dict[str, list[float]] = {name: [] for name in sources}
        for turn in range(repeats + 1):
            for name, source in sources.items():
                spent = cpu_seconds(source, words)
                if turn:
                    times[name].append(spent)
        medians = {name: median(each) for name, each in times.items()}
        found[way] = {name: round(value, 4) for name, value in medians.items()}
        found[way]["ratio"] = round(medians["now"] / medians["baseline"], 3)
        print(f"{way}: {found[way]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("baseline", nargs="?", default=BEFORE_INTEGRATIONS)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "baseline"
        subprocess.run(
            [*git, "worktree", "add", "--quiet", "--detach", str(tree), given.baseline], check=True
        )
        try:
            found = compare({"baseline": tree / "src", "now": ROOT / "src"}, given.repeats)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    print(json.dumps({"baseline": given.baseline, **found}))


if __name__ == "__main__":
    main()
