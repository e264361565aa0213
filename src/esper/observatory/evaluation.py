"""What an evaluation leaves behind: JSON, CSV and a picture, and three tables for the terminal.

All of it is made from the evaluation's report as a plain dictionary.
"""

import csv
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from esper.leyline import ConfigError
from esper.observatory.budget_picture import draw_budgets
from esper.observatory.picture import INK, LONGEST_NAME, QUIET, in_lines, new_figure
from esper.observatory.run_directory import TRACKED, lock_folder
from esper.observatory.terminal import place, plain_table, shown

REPORT, TRIALS, PLOT = "evaluation.json", "trials.csv", "evaluation.png"
BEGUN = "settings.json"  # written when an evaluation begins
# What makes a folder an evaluation, and goes when another takes its place.
DECISIONS = "decisions.jsonl"  # what happened in the episodes of learned policies
OWN = (BEGUN, REPORT, TRIALS, PLOT, "runs.jsonl", "networks", DECISIONS, TRACKED)
LOCK = ".evaluation.lock"  # not that of runs, which would take the folder for theirs
ARM, CONTROL, BETTER, WORSE = "#1f77b4", "#9a9a9a", "#238b45", "#cb181d"
SURE = 0.05

Report = Mapping[str, Any]


def _check_folder(folder: Path, *, overwrite: bool, resume: bool) -> None:
    """Raises ConfigError if an evaluation may not begin, or go on, in the folder; changes
    nothing."""
    if resume and overwrite:
        raise ConfigError("--resume goes on with an evaluation, --overwrite begins anew; give one")
    taken = [name for name in OWN if (folder / name).exists()]
    if resume and BEGUN not in taken:
        raise ConfigError(f"{folder} holds no evaluation to go on with; leave --resume out")
    if taken and not (resume or overwrite):
        cure = ", go on with it (--resume)" if BEGUN in taken else ""
        raise ConfigError(
            f"{folder} already holds an evaluation; choose another folder{cure} or --overwrite it"
        )


@contextmanager
def evaluation_folder(folder: Path, *, overwrite: bool, resume: bool) -> Iterator[None]:
    """Make the folder, and keep every other writer out of it.

    Raises ConfigError if it cannot be written or is in use; if it holds an evaluation and is
    neither to be overwritten nor to be gone on with; or if there is none to go on with.
    """
    _check_folder(folder, overwrite=overwrite, resume=resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    with lock_folder(folder, LOCK):
        if overwrite:
            _clear(folder)
        yield


def _clear(folder: Path) -> None:
    for name in OWN:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def write_evaluation(folder: Path, report: Report) -> list[Path]:
    """Write all three files and give their paths."""
    text = json.dumps(report, indent=2, allow_nan=False)
    (folder / REPORT).write_text(text + "\n", encoding="utf-8")
    rates = {arm["arm"]: arm["learning_rate"] for arm in report["arms"]}
    rows = [{**trial, "learning_rate": rates[trial["arm"]]} for trial in report["trials"]]
    for row in rows:
        row.pop("seeds", None)  # a list fits into no cell; the JSON has it
    with (folder / TRIALS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return [folder / REPORT, folder / TRIALS, draw_evaluation(folder / PLOT, report)]


# --- terminal ------------------------------------------------------------------------------------


def at_extra(report: Report, extra: float) -> Report:
    """The report of one extra budget alone: its arms by name, and the hosts they begin with."""
    names = {arm["arm"]: arm["name"] for arm in report["arms"] if arm["extra"] in (None, extra)}
    return {
        **report,
        "arms": [{**arm, "arm": arm["name"]} for arm in report["arms"] if arm["arm"] in names],
        "comparisons": [
            {**row, "arm": names[row["arm"]], "versus": names[row["versus"]]}
            for row in report["comparisons"]
            if row["arm"] in names and row["versus"] in names
        ],
    }


def arms_table(report: Report) -> Table:
    """One line per arm: means over the keys. Fits into 80 columns.

    "train" is multiply-adds of the whole training, "seeds" how many were germinated, "rate" the
    learning rate.
    """
    table = plain_table(
        "\narm",
        "\ntest",
        "\nparams",
        "mult-\nadds",
        "train\n10^6",
        "CPU\ns",
        "seeds/kept\n/culled",
        "roll\nback",
        "\nrate",
        gap=1,
    )
    for arm in report["arms"]:
        table.add_row(
            escape(arm["arm"]),
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
    heading = escape(f"difference of test {report['score']}")
    table = plain_table(heading, "mean", "95 % interval", "p (Holm)")
    for row in report["comparisons"]:
        table.add_row(
            escape(f"{row['arm']} - {row['versus']}"),
            f"{row['mean']:+.2f}",
            "-" if row["low"] is None else f"{row['low']:+.2f} … {row['high']:+.2f}",
            _p(row["p_holm"]),
        )
    return table


def seeds_worth_table(report: Report) -> Table | None:
    """One line per arm, blueprint and module: on how many keys it was kept, what it is worth.

    Means over the keys that kept it, in points of the validation score; None if no trial tells.
    """
    lives: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for trial in report["trials"]:
        for seed in trial.get("seeds") or ():
            lives[trial["arm"], f"{seed['blueprint']} in {place(seed)}"].append(seed)
    if not lives:
        return None
    table = plain_table("arm", "kept seed", "on keys", "lost without it", "Shapley value")
    table.columns[1].justify = "left"
    order = [arm["arm"] for arm in report["arms"]]
    for (arm, name), seeds in sorted(lives.items(), key=lambda life: order.index(life[0][0])):
        table.add_row(
            escape(arm),
            escape(name),
            f"{len(seeds)}/{len(report['keys'])}",
            shown(_mean(seeds, "contribution"), "+.2f"),
            shown(_mean(seeds, "shapley"), "+.2f"),
        )
    table.caption = f"points of validation {report['score']} that a seed is worth"
    table.caption_justify = "left"
    return table


def _mean(seeds: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [seed[name] for seed in seeds if seed.get(name) is not None]
    return sum(values) / len(values) if values else None


def _short(count: float) -> str:
    return f"{count:.1f}" if count < 9.95 else f"{count:.0f}"


def _name(arm: Mapping[str, Any]) -> str:
    width = "" if arm["width"] is None else f" (width {arm['width']})"
    shape = f" ({'-'.join(map(str, arm['shape']))})" if arm.get("shape") else ""
    return in_lines(arm["arm"] + width + shape, LONGEST_NAME)


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


# --- picture -------------------------------------------------------------------------------------


def draw_evaluation(path: Path, report: Report) -> Path:
    """Scores of every arm and key above, or over the extra budget if there is one; paired
    differences with their intervals below."""
    arms, comparisons = report["arms"], report["comparisons"]
    budgets = bool(report.get("extra"))
    heights = [4.5 if budgets else 0.36 * len(arms) + 0.9, 0.36 * len(comparisons) + 0.9]
    figure = new_figure(9, sum(heights) + 0.4)
    if comparisons:
        scores, differences = figure.subplots(2, 1, height_ratios=heights)
        _draw_differences(differences, comparisons, report["score"])
    else:
        scores = figure.subplots(1, 1)
    (draw_budgets if budgets else _draw_scores)(scores, report)
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
    names = [in_lines(f"{row['arm']} - {row['versus']}", 2 * LONGEST_NAME) for row in comparisons]
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
