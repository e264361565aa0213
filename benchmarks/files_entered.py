"""How many source files do `esper grow` and one round of `esper train ppo` enter?

    python benchmarks/files_entered.py [--list]

Runs both commands on a small task and notes every file of the package whose functions are called.
Files that only define names do not count. The last line is one JSON object: the number of files of
each command, and the lines of the source.
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
ROUND = ["train", "ppo", "--task", "digits", "--rounds", "1", "--envs", "16", "--steps", "12"]


@contextlib.contextmanager
def profiled(entered: set[str]) -> Iterator[None]:
    """Note the files of the package whose functions are called."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # A lazy import is not an entered file.
        if event == "call" and code.co_name != "__getattr__":
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE):
                entered.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def files_entered(words: list[str], folder: Path) -> set[str]:
    entered: set[str] = set()
    command: Callable[[], None] = entry_points(group="console_scripts")["esper"].load()
    sys.argv = ["esper", *words, "--out", str(folder)]
    silent = contextlib.redirect_stdout(io.StringIO())
    with profiled(entered), silent, contextlib.suppress(SystemExit):
        command()
    if not (folder / "outcomes.jsonl").read_text():
        raise RuntimeError(f"esper {' '.join(words)} wrote no outcome")
    return entered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files")
    options = parser.parse_args()
    for path in PACKAGE.rglob("*.py"):
        # First, so that code that runs at import does not count.
        import_module(".".join(("esper", *path.relative_to(PACKAGE).with_suffix("").parts)))
    with tempfile.TemporaryDirectory() as folder:
        entered = {
            "grow": files_entered(GROW, Path(folder) / "grow"),
            "ppo_round": files_entered(ROUND, Path(folder) / "ppo"),
        }
    if options.list:
        for name, files in entered.items():
            print(name, *sorted(files), sep="\n  ")
    lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    print(json.dumps({**{name: len(files) for name, files in entered.items()}, "lines": lines}))


if __name__ == "__main__":
    main()
