"""The command as tests run it: in a process of its own, or in this one when that is enough."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from esper.cli import main

ESPER = [sys.executable, "-m", "esper"]
# Wide enough that nothing is wrapped, and no data but what comes with packages.
SURROUNDINGS = {"COLUMNS": "200", "NO_COLOR": "1", "ESPER_DATA": "nowhere"}


def esper(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | SURROUNDINGS
    return subprocess.run(
        [*ESPER, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )


def start_esper(*words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Without waiting for it; errors are part of its output."""
    return subprocess.Popen(
        [*ESPER, *words],
        cwd=cwd,
        env=os.environ | SURROUNDINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Tests that a shell runs in the background would pass on that they ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def esper_here(monkeypatch: pytest.MonkeyPatch, *words: str, cwd: Path | None = None) -> int:
    """Run the command in this process; gives its exit code. With `cwd` as a process would."""
    if cwd is not None:
        monkeypatch.chdir(cwd)
        for name, value in SURROUNDINGS.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["esper", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)
