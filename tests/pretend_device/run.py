"""Run the tests on the simulated device; arguments are those of pytest."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = HERE / "cases.py"


def command(*words: str) -> list[str]:
    # In one process: a plug-in for several would start workers without the device.
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return [*pytest, "-o", "addopts=", str(CASES), *words]


if __name__ == "__main__":
    from pretend_device import environment

    sys.exit(subprocess.run(command(*sys.argv[1:]), env=environment()).returncode)
