"""Where time and memory go: a trace of a piece of work, and what this process holds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, supported_activities


@contextmanager
def training_profiler(path: Path) -> Iterator[None]:
    """Write a trace of what happens inside to `path`, in Chrome's format, which Perfetto opens.

    It traces every kind of device that this machine has, so it works on one that has none but its
    CPU; and this process only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(activities=sorted(supported_activities(), key=str)) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


def resident_mb(statm: Path = Path("/proc/self/statm")) -> float | None:
    """Megabytes that this process holds; None where the system does not tell."""
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
