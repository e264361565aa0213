"""How things look in every view: the colours and letters of the stages, and names as plain text."""

import math
import unicodedata
from typing import Any

# Okabe and Ito's palette, which stays apart for colour-blind eyes; lightness differs as well.
STAGE_COLOURS = {
    "GERMINATED": "#9fd3f2",
    "TRAINING": "#0072b2",
    "BLENDING": "#e69f00",
    "HOLDING": "#cc79a7",
    "FOSSILIZED": "#009e73",
    "CULLED": "#d55e00",
    "EMBARGOED": "#5c5c5c",
    "RESETTING": "#c4c4c4",
}
# For terminals without colour, and for those who do not see it.
STAGE_LETTERS = {"DORMANT": "·"} | {stage: stage[0] for stage in STAGE_COLOURS}

LONGEST = 160  # characters of a name that a view shows
# Marks that change the order in which letters stand, or cannot be seen.
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def plain(text: object, longest: int = LONGEST) -> str:
    """Somebody's text as one short line without anything that a terminal or browser obeys.

    Control characters, marks of direction and unknown characters stand as `\\u001b`.
    """
    words = str(text)
    cut = words if len(words) <= longest else words[: longest - 1] + "…"
    return "".join(
        f"\\u{ord(letter):04x}" if unicodedata.category(letter) in INVISIBLE else letter
        for letter in cut
    )


def presentable(value: Any) -> Any:
    """The same lists and dictionaries with every text plain, and None for what is no number.

    Whole numbers that a browser would round become text.
    """
    if isinstance(value, dict):
        return {plain(name): presentable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [presentable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        return str(value) if abs(value) < 2**256 else None
    if value is None or isinstance(value, bool | int | float):
        return value
    return plain(value)
