"""Memory that a process has freed stays with it, for the next batch."""

import ctypes

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Features of a batch are below this; it is the most that glibc allows.
LARGEST_KEPT = 32 * 2**20
MOST_KEPT = 512 * 2**20


def keep_memory() -> bool:
    """Have this process keep up to 512 MiB that it has freed, instead of giving them back to the
    system and asking for them again, page by page, with every batch. For good, and for everything
    in the process, so it is for processes of our own; says whether the C library can do so (glibc).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(M_TRIM_THRESHOLD, MOST_KEPT))
