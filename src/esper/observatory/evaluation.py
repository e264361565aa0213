"""What an evaluation leaves behind: JSON, CSV and a picture, and two tables for the terminal.

All of it is made from the evaluation's report as a plain dictionary.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from esper.leyline import ConfigError
from esper.observatory.picture import INK, QUIET, new_figure

REPORT, TRIALS, PLOT = "evaluation.json", "trials.csv", "evaluation.png"
ARM, CONTROL, BETTER, WORSE = "#1f77b4", "#9a9a9a", "#238b45", "#cb181d"
SURE = 0.05

Report = Mapping[str, Any]


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Make the folder; raises ConfigError if it holds an evaluation or cannot be written."""
    if not overwrite and (folder / REPORT).exists():
        raise ConfigError(
            f"{folder} already holds an evaluation; choose another folder or --overwrite it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error


def write_evaluation(folder: Path, report: Report) -> list[Path]:
    """Write all three files and give their paths."""
    text = json.dumps(report, indent=2, allow_nan=False)
    (folder / REPORT).write_text(text + "\n", encoding="utf-8")
    rates = {arm["arm"]: arm["learning_rate"] for arm in report["arms"]}
    rows = [{**trial, "learning_rate": rates[trial["arm"]]} for trial in report["trials"]]
    with (folder / TRIALS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return [folder / REPORT, folder / TRIALS, draw_evaluation(folder / PLOT, report)]


# --- terminal ------------------------------------------------------------------------------------


def arms_table(report: Report) -> Table:
    """One line per arm: means over the keys. Fits into 80 columns.

    "train" is multiply-adds of the whole training, "seeds" how many were germinated, "rate" the
    learning rate.
    """
    table = _plain_table()
    table.add_column("\narm", no_wrap=True)
    for heading in (
        "\ntest",
        "\nparams",
        "mult-\nadds",
        "train\n10^6",
        "CPU\ns",
        "seeds/\nkept/culled",
        "roll\nback",
        "\nrate",
    ):
        table.add_column(heading, justify="right")
    for arm in report["arms"]:
        table.add_row(
            arm["arm"],
            f"{arm['test_score']:.2f}",
            f"{arm['params']:,.0f}",
            f"{arm['macs']:,.0f}",
            f"{arm['train_macs'] / 1e6:,.0f}",
            f"{arm['cpu_seconds']:.1f}",
            "/".join(_short(arm[name]) for name in ("germinated", "fossilized", "culled")),
            f"{arm['rollbacks']:.1f}",
            f"{arm['learning_rate']:.2g}",
        )
    return table


def comparisons_table(report: Report) -> Table:
    """One line per comparison: the mean paired difference and how sure it is."""
    table = _plain_table()
    table.add_column(f"difference of test {report['score']}")
    for heading in ("mean", "95 % interval", "p (Holm)"):
        table.add_column(heading, justify="right")
    for row in report["comparisons"]:
        table.add_row(
            f"{row['arm']} - {row['versus']}",
            f"{row['mean']:+.2f}",
            "-" if row["low"] is None else f"{row['low']:+.2f} … {row['high']:+.2f}",
            _p(row["p_holm"]),
        )
    return table


def _short(count: float) -> str:
    return f"{count:.1f}" if count < 9.95 else f"{count:.0f}"


def _plain_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def _name(arm: Mapping[str, Any]) -> str:
    return arm["arm"] if arm["width"] is None else f"{arm['arm']} (width {arm['width']})"


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


# --- picture -------------------------------------------------------------------------------------


def draw_evaluation(path: Path, report: Report) -> Path:
    """Scores of every arm and key above, paired differences with their intervals below."""
    arms, comparisons = report["arms"], report["comparisons"]
    heights = [0.36 * len(arms) + 0.9, 0.36 * len(comparisons) + 0.9]
    figure = new_figure(9, sum(heights) + 0.4)
    if comparisons:
        scores, differences = figure.subplots(2, 1, height_ratios=heights)
        _draw_differences(differences, comparisons, report["score"])
    else:
        scores = figure.subplots(1, 1)
    _draw_scores(scores, report)
    figure.savefig(path)
    return path


def _draw_scores(axes: Any, report: Report) -> None:
    arms = report["arms"]
    lines = range(len(arms) - 1, -1, -1)
    for height, arm in zip(lines, arms, strict=True):
        own = [t["test_score"] for t in report["trials"] if t["arm"] == arm["arm"]]
        colour = ARM if arm["control_of"] is None else CONTROL
        axes.scatter(own, _spread(len(own), height), s=14, color=colour, alpha=0.45, linewidths=0)
        axes.plot([arm["test_score"]] * 2, [height - 0.32, height + 0.32], color=INK, linewidth=2)
        cost = f"{arm['params']:,.0f} p   {arm['train_macs'] / 1e6:,.0f} M"
        axes.annotate(
            cost, (1.01, height), xycoords=("axes fraction", "data"), va="center", fontsize=8,
            color=INK,
        )  # fmt: skip
    axes.annotate(
        "parameters, multiply-adds\nof the whole training", (1.01, len(arms) - 0.35),
        xycoords=("axes fraction", "data"), va="bottom", fontsize=7.5, color=QUIET,
    )  # fmt: skip
    axes.set_yticks(list(lines), [_name(arm) for arm in arms], fontsize=9)
    axes.set_ylim(-0.6, len(arms) - 0.4)
    n = len(report["keys"])
    axes.set_title(
        f"{report['task']}: test {report['score']}, {n} key{'s' if n > 1 else ''} "
        "(dots), mean (line)",
        loc="left",
        fontsize=10.5,
    )
    _tidy(axes)


def _spread(count: int, height: float) -> list[float]:
    """Heights that keep the dots of one line apart, the same at every drawing."""
    return [height + 0.24 * ((i * 7 % 11) / 10 - 0.5) * 2 for i in range(count)]


def _draw_differences(axes: Any, comparisons: Sequence[Mapping[str, Any]], score: str) -> None:
    axes.axvline(0.0, color=QUIET, linewidth=1)
    lines = range(len(comparisons) - 1, -1, -1)
    for height, row in zip(lines, comparisons, strict=True):
        sure = row["p_holm"] is not None and row["p_holm"] < SURE
        colour = (BETTER if row["mean"] > 0 else WORSE) if sure else INK
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [height, height], color=colour, linewidth=1.6)
        axes.plot([row["mean"]], [height], "o", color=colour, markersize=5)
        p = row["p_holm"]
        label = "" if p is None else f"p {_p(p)}" if p < 0.001 else f"p = {_p(p)}"
        axes.annotate(
            label, (1.01, height), xycoords=("axes fraction", "data"), va="center", fontsize=8,
            color=colour,
        )  # fmt: skip
    names = [f"{row['arm']} - {row['versus']}" for row in comparisons]
    axes.set_yticks(list(lines), names, fontsize=9)
    axes.set_ylim(-0.6, len(comparisons) - 0.4)
    axes.set_title(
        f"paired differences of test {score}, 95 % interval, p after Holm", loc="left",
        fontsize=10.5,
    )  # fmt: skip
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
