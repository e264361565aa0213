"""What a run shows on the terminal: a live progress bar, and tables at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from esper.leyline import IS_LIVE, NullRecorder, SeedStage
from esper.observatory.looks import STAGE_COLOURS

ON_ITS_WAY = [stage.name for stage in SeedStage if IS_LIVE[stage]]


def say(console: Console, text: str, *, whole: bool = False) -> None:
    """Print text as it is, brackets included; a `whole` line is not broken, so it can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=whole)


class StepProgress(NullRecorder):
    """A progress bar over the steps of one run: a recorder that shows the metrics it is told."""

    def __init__(self, console: Console, label: str, steps: int, first: int = 0) -> None:
        """`first` is the number of the first step, which rows count as 0."""
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

    def __enter__(self) -> "StepProgress":
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def metrics(self, row: Mapping[str, Any]) -> None:
        score = row["val_score"]
        self.progress.update(
            self.task,
            completed=row["step"] + self.first,
            score="" if score is None else f"validation {score:5.1f}",
            seeds=_seeds(row),
        )


class EpochLines(NullRecorder):
    """A line for every epoch, for where there is no terminal to draw on."""

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
            f"validation {shown(row['val_score'], '.2f')}",
            *([seeds] if seeds else []),
        ]
        say(self.console, "  ".join(words), whole=True)


def epoch_progress(label: str, epochs: int) -> StepProgress | EpochLines:
    """A progress bar on a terminal, a line per epoch elsewhere; use it as a context manager."""
    console = Console()
    if console.is_terminal:
        return StepProgress(console, label, epochs, first=1)
    return EpochLines(console, label, epochs)


class PhaseProgress:
    """One progress bar for whatever is under way; it moves on from phase to phase."""

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

    def __enter__(self) -> "PhaseProgress":
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def show(self, phase: str, done: int, total: int) -> None:
        self.progress.update(self.bar, description=phase, completed=done, total=total)


def modules_of(row: Mapping[str, Any]) -> list[str]:
    """The modules that have a slot, from the columns of a row of metrics, in their order."""
    return [column.removesuffix(".stage") for column in row if column.endswith(".stage")]


def _seeds(row: Mapping[str, Any]) -> str:
    """'2 kept, mlp blending in layer1': fossils are counted, seeds on their way are named."""
    stages = {module: row[f"{module}.stage"] for module in modules_of(row)}
    kept = sum(stage == "FOSSILIZED" for stage in stages.values())
    words = [f"[{STAGE_COLOURS['FOSSILIZED']}]{kept} kept[/]"] if kept else []
    for module, stage in stages.items():
        if stage in ON_ITS_WAY:
            seed = escape(f"{row[f'{module}.blueprint']} {stage.lower()} in {module}")
            words.append(f"[{STAGE_COLOURS[stage]}]{seed}[/]")
    return ", ".join(words)


def plain_table(*headings: str, gap: int = 2) -> Table:
    """A table without lines: words on the left under the first heading, then numbers.

    What goes into its cells is read as markup: `escape` what a user has named.
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    return table


def shown(value: float | None, form: str) -> str:
    """A number in the given format; '-' for what was not measured."""
    return "-" if value is None else format(value, form)


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 for less than an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary_table(rows: Sequence[Mapping[str, Any]], score: str) -> Table:
    """One line per arm: score on test data, and what the network costs."""
    table = plain_table("", f"test {score}", "parameters", "multiply-adds")
    for row in rows:
        table.add_row(
            escape(row["arm"]),
            shown(row["test_score"], ".1f"),
            shown(row["params"], ",d"),
            shown(row["macs"], ",d"),
        )
    return table


def place(seed: Mapping[str, Any]) -> str:
    """Where a seed is: the user's name of the module, and the slot."""
    return f"{seed['module']} ({seed['slot_id']})"


def seeds_table(seeds: Sequence[Mapping[str, Any]], score: str) -> Table:
    """One line per kept seed: what it is, where, its size, and what it is worth, in points.

    Worth is measured twice on validation data: by leaving out this seed alone, and as its Shapley
    value, its share of what all seeds gain together (± the standard error, if it was sampled).
    """
    table = plain_table("kept seed", "parameters", "lost without it", "Shapley value")
    for seed in seeds:
        error = seed.get("shapley_error")
        table.add_row(
            escape(f"{seed['blueprint']} in {place(seed)}"),
            shown(seed.get("params"), ",d"),
            shown(seed.get("contribution"), "+.2f"),
            shown(seed.get("shapley"), "+.2f") + ("" if error is None else f" ± {error:.2f}"),
        )
    table.caption = f"points of validation {score} that a seed is worth"
    table.caption_justify = "left"
    return table


def growth_in_words(outcome: Mapping[str, Any], seeds: Sequence[Mapping[str, Any]]) -> str:
    """What became of the seeds of one network, in a sentence."""
    kept = ", ".join(f"{seed['blueprint']} in {place(seed)}" for seed in seeds) or "no seed"
    early = "Interrupted; " if outcome["ended"] == "interrupted" else ""
    return (
        f"{early}{outcome['germinated']} seed{'' if outcome['germinated'] == 1 else 's'} "
        f"germinated, {outcome['culled']} culled; the network of epoch {outcome['best_step']} "
        f"is kept, with {kept}."
    )
