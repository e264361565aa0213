"""The folder of an evaluation, and its tables for the terminal.

Everything is made from the report of the evaluation as a plain dictionary.
"""

import csv
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from esper.leyline import ConfigError
from esper.observatory.formatting import (
    few_keys,
    format_columns,
    format_number,
    mean_of,
    seed_location,
)
from esper.observatory.run_directory import EVALUATION_LOCK, lock_folder, refuse_mixture
from esper.observatory.terminal import plain_table

REPORT, TRIALS = "evaluation.json", "trials.csv"
SETTINGS = "settings.json"  # written when an evaluation begins
DECISIONS = "decisions.jsonl"  # the episodes of learned policies
# The files of an evaluation; --overwrite removes them.
OWN = (SETTINGS, REPORT, TRIALS, "runs.jsonl", "networks", DECISIONS)

Report = Mapping[str, Any]


@contextmanager
def evaluation_folder(folder: Path, *, overwrite: bool, resume: bool) -> Iterator[None]:
    """Create the folder, and lock it against other writers.

    Raises ConfigError if it cannot be written or is in use; if it holds an evaluation and neither
    `overwrite` nor `resume` is given; or if there is none to resume.
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one of them")
    refuse_mixture(folder, EVALUATION_LOCK)
    taken = [name for name in OWN if (folder / name).exists()]
    if resume and SETTINGS not in taken:
        raise ConfigError(f"{folder} holds no evaluation to resume; leave out --resume")
    if taken and not (resume or overwrite):
        cure = ", continue it (--resume)" if SETTINGS in taken else ""
        raise ConfigError(
            f"{folder} already holds an evaluation; choose another folder{cure} or replace it "
            "(--overwrite)"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    with lock_folder(folder, EVALUATION_LOCK):
        for path in [folder / name for name in OWN] if overwrite else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        yield


def write_evaluation(folder: Path, report: Report) -> list[Path]:
    """Write the report as JSON and CSV, and give the paths."""
    text = json.dumps(report, indent=2, allow_nan=False)
    (folder / REPORT).write_text(text + "\n", encoding="utf-8")
    rates = {arm["arm"]: arm["learning_rate"] for arm in report["arms"]}
    rows = [{**trial, "learning_rate": rates[trial["arm"]]} for trial in report["trials"]]
    for row in rows:
        row.pop("seeds", None)  # a list does not fit into a cell; the JSON has it
    with (folder / TRIALS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return [folder / REPORT, folder / TRIALS]


def evaluation_summary(report: Report) -> list[Table | Text]:
    """What `esper evaluate` prints at its end: tables for every extra budget, the kept seeds, and
    how the arms were trained."""
    found: list[Table | Text] = []
    in_depth = report.get("scenario") == "depth"
    budgets = () if in_depth else report["extra"]
    for extra in budgets or (None,):
        rows = report if extra is None else at_extra(report, extra)
        if extra is not None:
            found.append(Text(f"Extra compute budget: {extra:g} of the host's training"))
        found.append(arms_table(rows))
        if rows["comparisons"]:
            found.append(comparisons_table(rows))
    seeds = kept_seeds_table(report)
    note = few_keys(report)
    words = _in_words(report) if note is None else f"{_in_words(report)}\n{note}"
    return [*found, *([] if seeds is None else [seeds]), Text(words)]


def _in_words(report: Report) -> str:
    words = [
        f"{len(report['keys'])} paired keys, {report['steps']} epochs."
        if len(report["keys"]) == report["keys_wanted"]
        else f"Interrupted: {len(report['keys'])} of {report['keys_wanted']} keys are complete."
    ]
    rates = [f"{rate:.2g}" for rate in report["learning_rates"]]
    if len(rates) > 1:
        words.append(f"Each arm chose its learning rate from {', '.join(rates)} on validation.")
    else:
        words.append(f"All arms used the learning rate {rates[0]}.")
    if report["reference"] is not None:
        words.append(f"The controls are matched to {report['reference']}.")
        arms = report["arms"]
        widths = [f"{arm['arm']} has width {arm['width']}" for arm in arms if arm["width"]]
        widths += [
            f"{arm['arm']} has the widths {'-'.join(map(str, arm['shape']))}"
            for arm in arms
            if arm["shape"]
        ]
        none = "The task has no wider hosts, so there is no best-static"
        if report.get("scenario") != "depth":
            words.append(f"{' and '.join(widths) or none}.")
    crossover = f"\n{report['crossover']}" if report["crossover"] else ""
    return " ".join(words) + crossover


def at_extra(report: Report, extra: float) -> Report:
    """The report of one extra budget: its arms by name, and the hosts they start from."""
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
    """One line per arm with means over the keys; it fits into 80 columns.

    "train" are the multiply-adds of the whole training, "rate" is the learning rate.
    """
    table = plain_table(
        *("\narm", "\ntest", "\nparams", "mult-\nadds", "train\n10^6", "CPU\ns"),
        *("seeds/kept\n/removed", "roll\nback", "\nrate"),
        gap=1,
    )
    for arm in report["arms"]:
        counts = [arm[name] for name in ("germinated", "fossilized", "culled")]
        table.add_row(
            escape(arm["arm"]),
            *format_columns(arm, {"test_score": ".2f", "params": ",.0f", "macs": ",.0f"}),
            f"{arm['train_macs'] / 1e6:,.0f}",
            f"{arm['cpu_seconds']:.1f}",
            "/".join(f"{n:.1f}" if n < 9.95 else f"{n:.0f}" for n in counts),
            f"{arm['rollbacks']:.1f}",
            f"{arm['learning_rate']:.2g}",
        )
    return table


def comparisons_table(report: Report) -> Table:
    """One line per comparison: the mean paired difference and its uncertainty."""
    heading = escape(f"difference of test {report['score']}")
    table = plain_table(heading, "mean", "95 % interval", "p (Holm)")
    for row in report["comparisons"]:
        p = row["p_holm"]
        table.add_row(
            escape(f"{row['arm']} - {row['versus']}"),
            f"{row['mean']:+.2f}",
            "-" if row["low"] is None else f"{row['low']:+.2f} … {row['high']:+.2f}",
            "< 0.001" if p is not None and p < 0.001 else format_number(p, ".3f"),
        )
    return table


def kept_seeds_table(report: Report) -> Table | None:
    """One line per arm, blueprint and module: on how many keys a seed was kept, and its mean
    contribution there, in points of the validation score. None if no trial has kept seeds."""
    kept: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for trial in report["trials"]:
        for seed in trial.get("seeds") or ():
            kept[trial["arm"], f"{seed['blueprint']} in {seed_location(seed)}"].append(seed)
    if not kept:
        return None
    table = plain_table("arm", "kept seed", "on keys", "contribution", "Shapley value")
    table.columns[1].justify = "left"
    order = [arm["arm"] for arm in report["arms"]]
    for (arm, name), seeds in sorted(kept.items(), key=lambda item: order.index(item[0][0])):
        table.add_row(
            escape(arm),
            escape(name),
            f"{len(seeds)}/{len(report['keys'])}",
            format_number(mean_of(seeds, "contribution"), "+.2f"),
            format_number(mean_of(seeds, "shapley"), "+.2f"),
        )
    table.caption = f"in points of validation {report['score']}"
    table.caption_justify = "left"
    return table
