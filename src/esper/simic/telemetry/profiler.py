"""Profiler traces of a round, and the memory of this process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerAction, profile, supported_activities

# A trace of all steps would be too large for a viewer.
TRACED_STEPS = 2


class TrainingProfiler:
    """Writes traces of one round to `folder` in Chrome's format, which Perfetto opens.

    They cover this process, on every kind of device that the machine has. Without a round the
    profiler does nothing.
    """

    def __init__(self, folder: Path, round_: int | None) -> None:
        self.folder, self.round = folder.resolve(), round_
        self.profile: profile | None = None

    @contextmanager
    def traced(self, round_: int, phase: str) -> Iterator[None]:
        """Trace a phase of a round, at most its first steps."""
        if round_ != self.round:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"round-{round_:06d}-{phase}.json"
        self.profile = profile(
            activities=sorted(supported_activities(), key=str),
            schedule=_first_steps,
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        )
        with self.profile:
            yield
        self.profile = None

    def step(self) -> None:
        """Call after each step of the environments."""
        if self.profile is not None:
            self.profile.step()


def _first_steps(step: int) -> ProfilerAction:
    if step < TRACED_STEPS - 1:
        return ProfilerAction.RECORD
    return ProfilerAction.RECORD_AND_SAVE if step < TRACED_STEPS else ProfilerAction.NONE


def resident_mb(statm: Path = Path("/proc/self/statm")) -> float | None:
    """Resident memory of this process in megabytes; None if the system does not report it."""
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
