"""What the scripts of the claims share: trials that are on disk as soon as they are finished,
paired comparisons, and one JSON object on the last line.

A trial is known by its arm and its key. Its row is a dictionary of plain values, with the settings
that it was run with, so that trials of two protocols are never mixed.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from esper.leyline import ConfigError
from esper.leyline.reports import few_pairs
from esper.proof.statistics import holm, paired_difference
from esper.tolaria.families.base import Member

RESULTS = Path(__file__).parent / "results"

# Arms of the claims about policies.
STATIC, RANDOM, FIXED, ORACLE, LEARNED = "static", "random", "fixed", "oracle", "learned"

Row = dict[str, Any]
# (arm, key)
Trials = dict[tuple[str, int], Row]


def finished(path: Path, settings: Mapping[str, Any]) -> Trials:
    """The trials in a file, one JSON object per line; none if there is no file.

    A last line that a kill has cut short is removed from the file. Raises ConfigError if a trial
    was run with other settings.
    """
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    rows = [json.loads(line) for line in whole.splitlines()]
    wanted = _plain(settings)
    for row in rows:
        if row["settings"] != wanted:
            raise ConfigError(
                f"{path} holds trials with other settings ({row['settings']}, not {wanted}): "
                "move it away, or ask for the same"
            )
    return {(row["arm"], row["key"]): row for row in rows}


def run_missing(
    path: Path,
    settings: Mapping[str, Any],
    arms: Sequence[str],
    keys: Iterable[int],
    run: Callable[[str, int], Mapping[str, Any]],
) -> Trials:
    """All trials of `arms` and `keys`, those that are not in the file run now, key by key.

    `run(arm, key)` gives what is to be remembered of a trial; the file has it at once, with the
    seconds that it took. A line about each goes to stderr.
    """
    trials = finished(path, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = [(arm, key) for key, arm in product(keys, arms)]
    for number, (arm, key) in enumerate(wanted, start=1):
        if (arm, key) in trials:
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        found = dict(run(arm, key))
        seconds = {
            "seconds": round(time.perf_counter() - wall, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
        }
        row = _plain({"arm": arm, "key": key, **found, **seconds, "settings": settings})
        append(path, [row])
        trials[arm, key] = row
        shown = " ".join(f"{name}={_short(value)}" for name, value in found.items())
        print(f"{number}/{len(wanted)} {arm} key {key}: {shown}", file=sys.stderr, flush=True)
    return {place: trials[place] for place in wanted}


def _plain(values: Mapping[str, Any]) -> Row:
    """As a file gives it back: lists for tuples."""
    plain: Row = json.loads(json.dumps(values))
    return plain


def append(path: Path, rows: Iterable[Row]) -> None:
    """Whole rows, on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def keys_with_all(trials: Trials, arms: Sequence[str]) -> list[int]:
    """The keys of which every one of `arms` has a trial, in order."""
    keys = sorted({key for _, key in trials})
    return [key for key in keys if all((arm, key) in trials for arm in arms)]


def means(trials: Trials, arms: Sequence[str], columns: Sequence[str]) -> dict[str, Row]:
    """For each arm the mean of each column over the keys that all arms have, and their number."""
    keys = keys_with_all(trials, arms)
    return {
        arm: {"n": len(keys)}
        | {name: sum(trials[arm, key][name] for key in keys) / len(keys) for name in columns}
        for arm in arms
        if keys
    }


def compare(
    trials: Trials,
    pairs: Sequence[tuple[str, str]],
    column: str,
    hosts: Mapping[int, Any] | None = None,
) -> list[Row]:
    """A family of comparisons `first - second`, paired over the keys that all of them have: mean,
    95 % interval (BCa), p-value, and p-value after Holm over the family.

    `hosts` names the host of each key. Keys of one host are not independent, so they are averaged
    first and the hosts are the pairs. Without `hosts` every key has its own host.
    """
    arms = list(dict.fromkeys(arm for pair in pairs for arm in pair))
    keys = keys_with_all(trials, arms)
    if not keys:
        return []
    of_host: dict[Any, list[int]] = {}
    for key in keys:
        of_host.setdefault(key if hosts is None else hosts[key], []).append(key)
    means = {
        arm: [fmean(trials[arm, key][column] for key in own) for own in of_host.values()]
        for arm in arms
    }
    found = [paired_difference(means[first], means[second]) for first, second in pairs]
    adjusted = holm([each.p for each in found])
    return [
        {"first": first, "second": second, "column": column, **asdict(each), "p_holm": p}
        for (first, second), each, p in zip(pairs, found, adjusted, strict=True)
    ]


def host_numbers(members: Iterable[Member]) -> dict[int, int]:
    """The host of each key, for `compare`."""
    return {key: member.number for member in members for key in member.keys}


def with_choices(trials: Trials, fixed: str, policies: Sequence[str]) -> Trials:
    """Also the arms that are made of others: random, fixed, the best in hindsight, the mean of all
    policies."""
    trials = dict(trials)
    for key in sorted({key for _, key in trials}):
        own = [row for (arm, k), row in trials.items() if k == key and "@" in arm]
        trials[RANDOM, key] = random.Random(key).choice(own)
        trials[ORACLE, key] = max(own, key=lambda row: float(row["test"]))
        trials[FIXED, key] = trials[fixed, key]
        learned = [trials[name, key] for name in policies if (name, key) in trials]
        if learned:
            columns = [
                name for name in ("test", "val", "params", "macs", "right") if name in own[0]
            ]
            mean = {n: sum(float(row[n]) for row in learned) / len(learned) for n in columns}
            trials[LEARNED, key] = {**learned[0], **mean}
    return trials


def best_fixed(trials: Trials) -> str:
    """The candidate that every host has with the best mean validation score."""
    keys = {key for _, key in trials}
    planted_arms = sorted({arm for arm, _ in trials if "@" in arm})
    arms = [arm for arm in planted_arms if all((arm, key) in trials for key in keys)]
    return max(arms, key=lambda arm: sum(trials[arm, key]["val"] for key in keys))


def print_comparisons(table: Sequence[Row]) -> None:
    """The table, and a sentence if there are too few pairs for any of it to be significant."""
    print_table(table)
    note = few_pairs(max((row["n"] for row in table), default=0), len(table))
    if note is not None:
        print(note)


def print_table(rows: Iterable[Mapping[str, Any]]) -> None:
    """Plain text with one column for each name of the first row; nothing for no rows."""
    listed = list(rows)
    if not listed:
        return
    cells = [list(listed[0]), *([_cell(value) for value in row.values()] for row in listed)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4f}"
    return str(value)


def print_json(result: Mapping[str, Any]) -> None:
    """The last line that a script prints."""
    print(json.dumps(result))
