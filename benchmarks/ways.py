"""How many files does a reader open to follow the two main ways through the house?

    python benchmarks/ways.py [--list]

Runs `esper grow` and one round of `esper train ppo` on a small task and notes every file of the
package in which a function was called, from the command to the weights: what merely defines names
that are used elsewhere is not on the way. The last line is one JSON object: files on each way, and
the lines of the source.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Any

import esper

PACKAGE = Path(esper.__file__).parent
GROW = ["grow", "--task", "digits", "--steps", "12", "--no-compare"]
ROUND = ["train", "ppo", "--task", "digits", "--rounds", "1", "--envs", "2", "--steps", "12"]


@contextlib.contextmanager
def watching(seen: set[str]) -> Iterator[None]:
    """Notes the files of the package whose functions are called."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # A door that hands on what lies behind it is no stop on the way.
        if event == "call" and code.co_name != "__getattr__":
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE):
                seen.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def follow(words: list[str], folder: Path) -> set[str]:
    seen: set[str] = set()
    command: Callable[[], None] = entry_points(group="console_scripts")["esper"].load()
    sys.argv = ["esper", *words, "--out", str(folder)]
    with watching(seen), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        command()
    if not (folder / "outcomes.jsonl").read_text():
        raise RuntimeError(f"esper {' '.join(words)} left no outcome")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files")
    options = parser.parse_args()
    for path in PACKAGE.rglob("*.py"):
        # First, so that what runs while a module is imported does not count.
        import_module(".".join(("esper", *path.relative_to(PACKAGE).with_suffix("").parts)))
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "grow": follow(GROW, Path(folder) / "grow"),
            "ppo_round": follow(ROUND, Path(folder) / "ppo"),
        }
    if options.list:
        for name, files in ways.items():
            print(name, *sorted(files), sep="\n  ")
    lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    print(json.dumps({**{name: len(files) for name, files in ways.items()}, "lines": lines}))


if __name__ == "__main__":
    main()
