"""What a training run shows on the terminal: a line per round, a bar for the steps of the next."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from esper.leyline import HEAD_NAMES
from esper.observatory.terminal import clock, shown


class RoundProgress:
    """Feed it the rows of metrics and of timings."""

    def __init__(self, console: Console, rounds: int, steps: int) -> None:
        self.console, self.rounds = console, rounds
        self.began, self.played = time.monotonic(), 0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            console=console,
            transient=True,
        )
        self.task = self.bar.add_task("playing", total=steps)

    def __enter__(self) -> "RoundProgress":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def step(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def round(self, number: int, row: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        self.played += 1
        per_round = (time.monotonic() - self.began) / self.played
        left = per_round * (self.rounds - number - 1)
        line = round_line(row, timing, number, self.rounds, left)
        self.console.print(line, highlight=False, soft_wrap=True)


def round_line(
    row: Mapping[str, Any], timing: Mapping[str, Any], number: int, rounds: int, left: float
) -> str:
    """Round, return, score, entropy by head, KL, speed, share of the hosts, time left."""
    entropies = " ".join(
        f"{head} {shown(row.get(f'{head}_entropy'), '.2f')}" for head in HEAD_NAMES
    )
    hosts = timing["seconds.hosts"] / timing["seconds"]
    words = [
        f"round {number + 1}/{rounds}",
        f"return {shown(row['return'], '+.3f')}",
        f"score {shown(row['val_score'], '.1f')}",
        f"entropy {entropies}",
        f"KL {shown(row['approx_kl'], '.4f')}",
        f"{timing['steps_per_second']:.0f} steps/s (hosts {hosts:.0%})",
        f"left {clock(left)}",
    ]
    if row.get("unseen_score") is not None:
        words.insert(3, f"unseen {row['unseen_score']:.2f}")
    if row.get("anomalies"):
        words.append(f"[yellow]{row['anomalies']}[/]")
    return "  ".join(words)
