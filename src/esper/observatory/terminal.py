"""What a run shows on the terminal: a live progress bar, and a table at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from esper.leyline import EpisodeOutcome
from esper.leyline.events import Event

_COLOURS = {
    "GERMINATED": "cyan",
    "TRAINING": "cyan",
    "BLENDING": "yellow",
    "HOLDING": "magenta",
}


class StepProgress:
    """A recorder that shows the steps of one run as a progress bar."""

    def __init__(self, console: Console, label: str, steps: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", justify="left"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeRemainingColumn(compact=True),
            TextColumn(
                "{task.fields[seeds]}", table_column=Column(no_wrap=True, overflow="ellipsis")
            ),
            console=console,
        )
        self.task = self.progress.add_task(label, total=steps, score="", seeds="")

    def __enter__(self) -> "StepProgress":
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def event(self, event: Event) -> None:
        pass

    def outcome(self, outcome: EpisodeOutcome) -> None:
        pass

    def metrics(self, row: Mapping[str, Any]) -> None:
        score = row["val_score"]
        self.progress.update(
            self.task,
            completed=row["step"],
            score="" if score is None else f"validation {score:5.1f}",
            seeds=_seeds(row),
        )


class PhaseProgress:
    """One progress bar for whatever is under way; it moves on from phase to phase."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self.bar = self.progress.add_task("starting", total=None)

    def __enter__(self) -> "PhaseProgress":
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def show(self, phase: str, done: int, total: int) -> None:
        self.progress.update(self.bar, description=phase, completed=done, total=total)


def _seeds(row: Mapping[str, Any]) -> str:
    """'2 kept, mlp blending': fossils are counted, seeds on their way are named."""
    stages = {key.removesuffix(".stage"): row[key] for key in row if key.endswith(".stage")}
    kept = sum(stage == "FOSSILIZED" for stage in stages.values())
    words = [f"[green]{kept} kept[/]"] if kept else []
    for slot, stage in stages.items():
        if stage in _COLOURS:
            words.append(f"[{_COLOURS[stage]}]{row[f'{slot}.blueprint']} {stage.lower()}[/]")
    return ", ".join(words)


def summary_table(rows: Sequence[Mapping[str, Any]], score: str) -> Table:
    """One line per arm: score on test data, and what the network costs."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in (f"test {score}", "parameters", "multiply-adds"):
        table.add_column(heading, justify="right")
    for row in rows:
        value = row["test_score"]
        table.add_row(
            row["arm"],
            "-" if value is None else f"{value:.1f}",
            f"{row['params']:,}",
            f"{row['macs']:,}",
        )
    return table
