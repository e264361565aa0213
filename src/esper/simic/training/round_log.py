"""The records of a round, and the time and memory that it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import record_function

from esper.leyline import History, NullRecorder, RoundRecorder
from esper.leyline.events import Event, GovernorSnapshot
from esper.simic.telemetry.profiler import resident_mb

# Phases of a round; `hosts` is training and evaluating them.
PHASES = ("hosts", "reward", "policy", "update", "validation", "telemetry", "checkpoint")


class Clock:
    """Seconds of one round by phase. A phase inside another interrupts it: nothing counts twice.

    The results of a phase must be in host memory when it ends, so that the device has finished.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.current: str | None = None
        self.began = self.mark = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        outer, self.current = self.current, name
        try:
            # So that traces of the profiler show phases.
            with record_function(name):
                yield
        finally:
            self._charge()
            self.current = outer

    def _charge(self) -> None:
        now = time.perf_counter()
        if self.current is not None:
            self.seconds[self.current] += now - self.mark
        self.mark = now

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count time that was measured in a worker for another phase."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def row(self, env_steps: int) -> dict[str, Any]:
        total = time.perf_counter() - self.began
        phases = {f"seconds.{name}": self.seconds[name] for name in PHASES}
        return {"seconds": total, "steps_per_second": env_steps / total, **phases}


class RoundLog(History):
    """The records of one round: passed on to `record` at once, and kept until the next round.

    Snapshots of the governor, one per environment and step, are kept only with `detailed`.
    """

    def __init__(self, record: RoundRecorder | None = None) -> None:
        self.record = record or NullRecorder()
        super().__init__(listeners=(self.record,))
        self.clock, self.detailed = Clock(), True

    def begin(self, round_: int, *, detailed: bool) -> None:
        self.clear()
        self.clock, self.detailed = Clock(), detailed
        self.record.begin_round(round_)

    def event(self, event: Event) -> None:
        if self.detailed or not isinstance(event, GovernorSnapshot):
            super().event(event)

    def end(self, env_steps: int) -> dict[str, Any]:
        """Record the row of timings at the end of the round."""
        row = self.clock.row(env_steps) | {"memory_mb": resident_mb()}
        self.record.timing(row)
        return row
