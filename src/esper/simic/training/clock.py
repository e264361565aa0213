"""Where the time of a round goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What a round spends its time on; `hosts` is training and evaluating them.
PHASES = ("hosts", "reward", "policy", "update", "telemetry", "checkpoint")


class Clock:
    """Seconds of one round by phase. A phase inside another interrupts it: nothing counts twice."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.current: str | None = None
        self.began = self.mark = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        outer, self.current = self.current, name
        try:
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
        """What was measured elsewhere belongs to another phase."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def row(self, env_steps: int) -> dict[str, Any]:
        total = time.perf_counter() - self.began
        phases = {f"seconds.{name}": self.seconds[name] for name in PHASES}
        return {"seconds": total, "steps_per_second": env_steps / total, **phases}
