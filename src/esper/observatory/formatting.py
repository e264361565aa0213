"""Formatting that every view shares: names and colours of stages, safe text, numbers."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from esper.leyline.few_pairs import few_pairs
from esper.observatory.reading import number

# What users see instead of the names of `SeedStage`.
STAGE_NAMES = {
    "DORMANT": "empty",
    "GERMINATED": "planted",
    "TRAINING": "learning",
    "BLENDING": "blending",
    "HOLDING": "on trial",
    "FOSSILIZED": "kept",
    "CULLED": "removed",
    "EMBARGOED": "resting",
    "RESETTING": "resting",
}
# For terminals without colour and for readers who do not see it.
STAGE_LETTERS = dict(zip(STAGE_NAMES, "·PLBTKR--", strict=True))
# The palette of Okabe and Ito: colour-blind readers can tell it apart; lightness differs as well.
STAGE_COLOURS = {
    "GERMINATED": "#9fd3f2",
    "TRAINING": "#0072b2",
    "BLENDING": "#e69f00",
    "HOLDING": "#cc79a7",
    "FOSSILIZED": "#009e73",
    "CULLED": "#d55e00",
    "EMBARGOED": "#5c5c5c",
    "RESETTING": "#5c5c5c",
}

MAX_TEXT = 160  # characters of a name that a view shows
# Unicode categories that change the order of letters or are invisible.
UNSAFE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def stage_name(stage: object) -> str:
    """The name of a stage for users; text that is no stage in lower case."""
    return STAGE_NAMES.get(str(stage), str(stage).lower())


def with_stage_names(text: str) -> str:
    """The same text with the names of stages for users."""
    return re.sub(r"[A-Z]{6,}", lambda word: STAGE_NAMES.get(word[0], word[0]), text)


def safe_text(text: object, longest: int = MAX_TEXT) -> str:
    """One short line that no terminal or browser interprets.

    Control characters, direction marks and unknown characters are shown as `\\u001b`.
    """
    line = str(text)
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    return "".join(
        f"\\u{ord(letter):04x}" if unicodedata.category(letter) in UNSAFE else letter
        for letter in line
    )


def sanitize(value: Any) -> Any:
    """The same lists and dictionaries with safe text, and None for numbers that are not finite.

    Integers that a browser would round become text.
    """
    if isinstance(value, dict):
        return {safe_text(name): sanitize(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [sanitize(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        return str(value) if abs(value) < 2**256 else None
    if value is None or isinstance(value, bool | int | float):
        return value
    return safe_text(value)


def format_number(value: float | None, form: str) -> str:
    """A number in the given format; '-' if it was not measured."""
    return "-" if value is None else format(value, form)


def format_columns(row: Mapping[str, Any], forms: Mapping[str, str]) -> list[str]:
    """The numbers of these columns, each in its format."""
    return [format_number(number(row, name), form) for name, form in forms.items()]


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of the values that were measured."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def format_duration(seconds: float) -> str:
    """1:02:03, or 2:03 for less than an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def modules_of(row: Mapping[str, Any]) -> list[str]:
    """The modules that have a slot, from the columns of a metrics row, in order."""
    return [column.removesuffix(".stage") for column in row if column.endswith(".stage")]


def slot_columns(row: Mapping[str, Any], module: str) -> tuple[Any, Any, Any, Any]:
    """Stage, blueprint, alpha and contribution of a slot, from a metrics row."""
    alpha, contribution = (number(row, f"{module}.{name}") for name in ("alpha", "contribution"))
    return row.get(f"{module}.stage"), row.get(f"{module}.blueprint"), alpha, contribution


def seed_location(seed: Mapping[str, Any]) -> str:
    """The name of the module, and the slot in brackets."""
    return f"{seed['module']} ({seed['slot_id']})"


def few_keys(report: Mapping[str, Any]) -> str | None:
    """One sentence if an evaluation has too few keys for any significant difference."""
    rows = report["comparisons"]
    known = [row["n"] for row in rows if isinstance(row.get("n"), int)]
    return few_pairs(min(known), len(rows)) if known else None
