"""Run with the name of a JSON file: does each extra work where only its own packages are installed?

The file says for every extra which distributions and top-level modules it must not find, the code
that uses it, and code that needs other extras, by their names. What must not be found is as good as
not installed. The core is loaded once, without any extra; each extra is tried in a fork of that.
"""

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HIDDEN: set[str] = set()  # modules, and distributions by their names


class Installed(PathFinder):
    """Finds what the usual finder does, but for what is hidden."""

    @staticmethod
    def find_distributions(
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[Distribution]:
        found = PathFinder.find_distributions(context)
        return (each for each in found if _canonical(each.metadata["Name"]) not in HIDDEN)

    @classmethod
    def find_spec(
        cls, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.split(".")[0] not in HIDDEN:
            return PathFinder.find_spec(name, path, target)
        # Ray brings some packages along, in a folder of its own.
        brought = [each for each in sys.path if each.endswith("thirdparty_files")]
        return PathFinder.find_spec(name, path or brought, target)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def try_extra(extra: str, case: dict[str, Any]) -> None:
    from esper.leyline import PackageMissingError

    HIDDEN.clear()
    HIDDEN.update(case["hidden"])
    importlib.invalidate_caches()
    exec(case["use"], {"__name__": extra})
    for other, code in case["others"].items():
        try:
            exec(code, {"__name__": other})
        except PackageMissingError as error:
            message = str(error)
        else:
            raise AssertionError(f"{other} works with {extra} alone")
        assert f"esper-grow[{other}]" in message, message


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
    HIDDEN.update(*(case["hidden"] for case in cases.values()))
    import esper.api
    import esper.proof  # noqa: F401

    for extra, case in cases.items():
        child = os.fork()
        if child == 0:
            try:
                try_extra(extra, case)
            except BaseException:  # noqa: BLE001  # told, whatever it is, and never the parent's
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(extra, "works" if status == 0 else "FAILS", flush=True)


if __name__ == "__main__":
    main()
