"""Warns before memory runs out."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from esper.leyline import constants as c
from esper.leyline.events import MemoryWarning

# (bytes in use, bytes there are), or None where that cannot be known.
Reading = tuple[int, int] | None


def read_memory(device: torch.device) -> Reading:
    """Of a CUDA device all that is in use; of the CPU what this process holds."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total
    statm = Path("/proc/self/statm")
    if device.type != "cpu" or not statm.exists():
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(statm.read_text().split()[1])
    return resident * page, os.sysconf("SC_PHYS_PAGES") * page


class MemoryWatch:
    """Call `check` once per round; after a warning it is silent for `cooldown` checks."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        share: float = c.MEMORY_WARNING_SHARE,
        cooldown: int = c.MEMORY_WARNING_COOLDOWN_CHECKS,
        read: Callable[[torch.device], Reading] = read_memory,
    ) -> None:
        self.device = torch.device(device)
        self.share, self.cooldown, self.read = share, cooldown, read
        self.silent_for = 0

    def check(self, update: int) -> MemoryWarning | None:
        if self.silent_for > 0:
            self.silent_for -= 1
            return None
        reading = self.read(self.device)
        if reading is None or reading[0] < self.share * reading[1]:
            return None
        used, total = reading
        self.silent_for = self.cooldown
        return MemoryWarning(-1, update, str(self.device), used / total, used, total)
