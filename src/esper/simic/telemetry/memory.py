"""How much memory training holds."""

import os
from pathlib import Path


def resident_mb(statm: Path = Path("/proc/self/statm")) -> float | None:
    """Megabytes that this process holds; None where the system does not tell."""
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
