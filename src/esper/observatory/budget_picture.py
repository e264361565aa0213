"""Scores over extra budgets: a line for each arm that begins with a trained host or replaces it."""

from collections.abc import Mapping
from typing import Any

from esper.observatory.picture import INK, QUIET

# Colours that differ in lightness too.
LINES = ("#4d4d4d", "#7a5195", "#ef8a17", "#2c7fb8", "#31a354", "#a6761d", "#e377c2", "#17becf")
GROWN = "#cb181d"
APART = 0.012  # of the axis: intervals of one budget stand beside each other


def draw_budgets(axes: Any, report: Mapping[str, Any]) -> None:
    """Mean test score of every arm over the extra budget, with its 95 % interval. The hosts as they
    were are dotted lines; the crossover stands below."""
    extras = report["extra"]
    names = list(dict.fromkeys(arm["name"] for arm in report["arms"] if arm["extra"] is not None))
    others = (colour for colour in LINES * len(names))
    wide = extras[-1] - extras[0] or 1.0
    for place, name in enumerate(names):
        own = [arm for arm in report["arms"] if arm["name"] == name]
        grows = name in report["arms_wanted"]
        colour = GROWN if name == report["reference"] else next(others)
        at = [arm["extra"] + APART * wide * (place - len(names) / 2) for arm in own]
        axes.plot(
            at, [arm["test_score"] for arm in own], marker="o", markersize=4, label=name,
            color=colour, linewidth=2.4 if grows else 1.4,
        )  # fmt: skip
        for x, arm in zip(at, own, strict=True):
            if arm["test_low"] is not None:
                axes.plot([x, x], [arm["test_low"], arm["test_high"]], color=colour, linewidth=1)
    for arm in report["arms"]:
        if arm["extra"] is None:
            axes.axhline(arm["test_score"], color=QUIET, linestyle=":", linewidth=1.2)
            axes.annotate(
                arm["name"], (1.01, arm["test_score"]), xycoords=("axes fraction", "data"),
                va="center", fontsize=8, color=QUIET,
            )  # fmt: skip
    axes.set_xticks(extras, [f"{extra:g}" for extra in extras])
    label = "extra budget, as a share of what the host's training cost"
    axes.set_xlabel(label if not report["crossover"] else f"{label}\n{report['crossover']}")
    axes.xaxis.label.set(color=INK, fontsize=8.5)
    axes.xaxis.label.set_wrap(True)
    n = len(report["keys"])
    axes.set_title(
        f"{report['task']}, {report['scenario']}: mean test {report['score']} of {n} "
        f"key{'s' if n > 1 else ''}, 95 % interval",
        loc="left",
        fontsize=10.5,
    )
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
