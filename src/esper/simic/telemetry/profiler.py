"""Where time and memory go: traces of a round, and what this process holds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerAction, profile, supported_activities

# Steps are much like each other, and a trace of all of them is too large to be opened.
TRACED_STEPS = 2


class TrainingProfiler:
    """Writes traces of one round to `folder`, in Chrome's format, which Perfetto opens.

    They show every kind of device that this machine has, so it works on one that has none but its
    CPU; and this process only. Without a round it does nothing.
    """

    def __init__(self, folder: Path, round_: int | None) -> None:
        self.folder, self.round = folder.resolve(), round_
        self.profile: profile | None = None

    @contextmanager
    def traced(self, round_: int, part: str) -> Iterator[None]:
        """A part of a round, up to the end of its first steps if it has any."""
        if round_ != self.round:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"round-{round_:06d}-{part}.json"
        self.profile = profile(
            activities=sorted(supported_activities(), key=str),
            schedule=_first_steps,
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        )
        with self.profile:
            yield
        self.profile = None

    def step(self) -> None:
        """A step of the environments is over."""
        if self.profile is not None:
            self.profile.step()


def _first_steps(step: int) -> ProfilerAction:
    if step < TRACED_STEPS - 1:
        return ProfilerAction.RECORD
    return ProfilerAction.RECORD_AND_SAVE if step < TRACED_STEPS else ProfilerAction.NONE


def resident_mb(statm: Path = Path("/proc/self/statm")) -> float | None:
    """Megabytes that this process holds; None where the system does not tell."""
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
