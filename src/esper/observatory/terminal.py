"""Progress bars and tables for the terminal."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from esper.leyline import HEAD_NAMES, IS_LIVE, NullRecorder, SeedStage
from esper.leyline.errors import visible
from esper.observatory.formatting import (
    STAGE_COLOURS,
    format_columns,
    format_duration,
    format_number,
    modules_of,
    seed_location,
    stage_name,
)

LIVE_STAGES = [stage.name for stage in SeedStage if IS_LIVE[stage]]


class SafeConsole(Console):
    """Shows control characters and direction marks in texts instead of executing them."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text, keep="\n"), style, control)


def say(console: Console, text: str, *, whole: bool = False) -> None:
    """Print text without markup; a `whole` line is not wrapped, so that it can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=whole)


def print_spaced(console: Console, items: Iterable[Table | Text]) -> None:
    """Print tables and texts, with an empty line before each."""
    for item in items:
        console.print()
        console.print(item)


class _Bar:
    progress: Progress

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()


class StepProgress(_Bar, NullRecorder):
    """A recorder that shows the metrics rows of one run as a progress bar.

    `first` is the number to show for step 0.
    """

    def __init__(self, console: Console, label: str, steps: int, first: int = 0) -> None:
        self.first = first
        self.progress = Progress(
            TextColumn("{task.description}", justify="left", markup=False),
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

    def metrics(self, row: Mapping[str, Any]) -> None:
        score = row["val_score"]
        self.progress.update(
            self.task,
            completed=row["step"] + self.first,
            score="" if score is None else f"validation {score:5.1f}",
            seeds=_seeds(row),
        )


class EpochLines(NullRecorder):
    """A recorder that prints a line per epoch, for output that is not a terminal."""

    def __init__(self, console: Console, label: str, epochs: int) -> None:
        self.console, self.label, self.epochs = console, label, epochs

    def __enter__(self) -> "EpochLines":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def metrics(self, row: Mapping[str, Any]) -> None:
        seeds = Text.from_markup(_seeds(row)).plain
        words = [
            f"{self.label} epoch {row['step'] + 1}/{self.epochs}",
            f"validation {format_number(row['val_score'], '.2f')}",
            *([seeds] if seeds else []),
        ]
        say(self.console, "  ".join(words), whole=True)


def epoch_progress(label: str, epochs: int) -> StepProgress | EpochLines:
    """A progress bar on a terminal, a line per epoch elsewhere; use it as a context manager."""
    console = SafeConsole()
    if console.is_terminal:
        return StepProgress(console, label, epochs, first=1)
    return EpochLines(console, label, epochs)


class PhaseProgress(_Bar):
    """One progress bar for work in several phases."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description:<34}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self.bar = self.progress.add_task("starting", total=None)

    def show(self, phase: str, done: int, total: int) -> None:
        self.progress.update(self.bar, description=phase, completed=done, total=total)


class RoundProgress(_Bar):
    """A line per round of PPO training, and a bar for the steps of the current round."""

    def __init__(self, console: Console, rounds: int, steps: int) -> None:
        self.console, self.rounds = console, rounds
        self.began, self.played = time.monotonic(), 0
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24))
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task("playing", total=steps)

    def step(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def round(self, number: int, row: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        self.played += 1
        per_round = (time.monotonic() - self.began) / self.played
        left = per_round * (self.rounds - number - 1)
        line = round_line(row, timing, number, self.rounds, left)
        self.console.print(line, highlight=False, soft_wrap=True)


def round_line(
    row: Mapping[str, Any], timing: Mapping[str, Any], number: int, rounds: int, left: float
) -> str:
    """Round, return, scores, entropy by head, KL, speed, share of time in the hosts, time left."""
    entropies = " ".join(
        f"{head} {format_number(row.get(f'{head}_entropy'), '.2f')}" for head in HEAD_NAMES
    )
    hosts = timing["seconds.hosts"] / timing["seconds"]
    words = [
        f"round {number + 1}/{rounds}",
        f"return {format_number(row['return'], '+.3f')}",
        f"score {format_number(row['val_score'], '.1f')}",
        f"entropy {entropies}",
        f"KL {format_number(row['approx_kl'], '.4f')}",
        f"{timing['steps_per_second']:.0f} steps/s (hosts {hosts:.0%})",
        f"left {format_duration(left)}",
    ]
    if row.get("validation_hosts_score") is not None:
        words.insert(3, f"validation hosts {row['validation_hosts_score']:.2f}")
    if row.get("anomalies"):
        words.append(f"[yellow]{row['anomalies']}[/]")
    return "  ".join(words)


def _seeds(row: Mapping[str, Any]) -> str:
    """'2 kept, mlp blending in layer1': kept seeds are counted, live ones are named."""
    stages = {module: row[f"{module}.stage"] for module in modules_of(row)}
    kept = sum(stage == "FOSSILIZED" for stage in stages.values())
    words = [f"[{STAGE_COLOURS['FOSSILIZED']}]{kept} kept[/]"] if kept else []
    for module, stage in stages.items():
        if stage in LIVE_STAGES:
            seed = escape(f"{row[f'{module}.blueprint']} {stage_name(stage)} in {module}")
            words.append(f"[{STAGE_COLOURS[stage]}]{seed}[/]")
    return ", ".join(words)


def plain_table(*headings: str, gap: int = 2) -> Table:
    """A table without borders: text in the first column, numbers in the others.

    Cells are read as markup, so names that users have chosen must be escaped.
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    return table


def summary_table(rows: Sequence[Mapping[str, Any]], score: str) -> Table:
    """One line per arm: score on test data, and the cost of the network."""
    table = plain_table("", f"test {score}", "parameters", "multiply-adds")
    for row in rows:
        forms = {"test_score": ".1f", "params": ",.0f", "macs": ",.0f"}
        table.add_row(escape(row["arm"]), *format_columns(row, forms))
    return table


def seeds_table(seeds: Sequence[Mapping[str, Any]], score: str) -> Table:
    """One line per kept seed: blueprint, module, size, and contribution on validation data.

    The contribution is the score lost without this seed alone. The Shapley value is its share of
    the gain of all seeds together (± the standard error, if it was sampled).
    """
    table = plain_table("kept seed", "parameters", "contribution", "Shapley value")
    for seed in seeds:
        error = seed.get("shapley_error")
        forms = {"params": ",.0f", "contribution": "+.2f", "shapley": "+.2f"}
        params, contribution, shapley = format_columns(seed, forms)
        shapley += "" if error is None else f" ± {error:.2f}"
        name = escape(f"{seed['blueprint']} in {seed_location(seed)}")
        table.add_row(name, params, contribution, shapley)
    table.caption = f"in points of validation {score}"
    table.caption_justify = "left"
    return table


def growth_summary(
    rows: Sequence[Mapping[str, Any]],
    outcome: Mapping[str, Any],
    seeds: Sequence[Mapping[str, Any]],
    score: str,
) -> list[Table | Text]:
    """What `esper grow` prints at its end; whatever is empty is left out."""
    found: list[Table | Text] = [summary_table(rows, score)] if rows else []
    if seeds:
        found.append(seeds_table(seeds, score))
    return [*found, Text(growth_in_words(outcome, seeds))] if outcome else found


def growth_in_words(outcome: Mapping[str, Any], seeds: Sequence[Mapping[str, Any]]) -> str:
    """One sentence about the seeds of one network."""
    kept = ", ".join(f"{seed['blueprint']} in {seed_location(seed)}" for seed in seeds) or "no seed"
    early = "Interrupted; " if outcome["ended"] == "interrupted" else ""
    return (
        f"{early}{outcome['germinated']} seed{'' if outcome['germinated'] == 1 else 's'} "
        f"planted, {outcome['culled']} removed; the network of epoch {outcome['best_step']} is the "
        f"result, with {kept}."
    )
