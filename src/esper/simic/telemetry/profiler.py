"""Where the time goes: torch's profiler into the run directory, and a timer that waits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import (
    profile,
    schedule,
    supported_activities,
    tensorboard_trace_handler,
)


@contextmanager
def training_profiler(
    run_dir: Path,
    enabled: bool = True,
    *,
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    repeat: int = 1,
) -> Iterator[profile | None]:
    """Trace `active` rounds into `run_dir`/profile; call `step()` on what it yields every round.

    Yields None when not enabled. It traces every kind of device that this machine has, so it works
    on one that has none but its CPU.
    """
    if not enabled:
        yield None
        return
    folder = run_dir.resolve() / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=sorted(supported_activities(), key=str),
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=repeat),
        on_trace_ready=tensorboard_trace_handler(str(folder)),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        yield profiler


class DeviceTimer:
    """Milliseconds spent inside a `with`, after the device has finished what was asked of it."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.milliseconds: float | None = None

    def __enter__(self) -> "DeviceTimer":
        self._wait()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wait()
        self.milliseconds = 1000.0 * (time.perf_counter() - self._start)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
