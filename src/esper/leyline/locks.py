"""Locks of files between processes. Windows has none here: `try_lock` then always succeeds."""

from types import ModuleType
from typing import IO

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def try_lock(file: IO[bytes] | int, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock. Raises OSError
    on a file system without locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: IO[bytes]) -> None:
    """Lock an open file until it is closed, as soon as no other process holds the lock."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
