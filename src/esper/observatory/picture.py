"""Pictures: a run (score by epoch, stages of every slot below), and an evaluation."""

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.formatting import STAGE_COLOURS, few_keys, modules_of, stage_name
from esper.observatory.run_directory import METRICS, PICTURE, read_rows

INK, QUIET = "#222222", "#8a8a8a"
WIDTH = 8.0  # of the picture, in inches
LONGEST_NAME, LONGEST_TITLE = 32, 100  # characters in a line


def require_matplotlib() -> None:
    """Raises ConfigError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures need matplotlib; install it with: pip install 'esper-grow[plot]'"
        )


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that size in inches, without a window or global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_growth(run: Path, title: str, compare_with: dict[str, Path] | None = None) -> Path:
    """Draw environment 0 of `run` to growth.png in its folder and give the path.

    `compare_with` maps labels to other run folders; their scores are drawn as thin lines. Raises
    ConfigError if matplotlib is not installed or there is nothing to draw.
    """
    require_matplotlib()
    rows = _steps(run)
    if not rows:
        raise ConfigError(f"{run} holds no steps yet; there is nothing to draw")
    others = {label: _steps(other) for label, other in (compare_with or {}).items()}
    target = run / PICTURE
    growth_figure(rows, title, others).savefig(target)
    return target


def growth_figure(
    rows: list[dict[str, Any]], title: str, others: dict[str, list[dict[str, Any]]] | None = None
) -> Any:
    """The same as a matplotlib figure, from one metrics row per step."""
    require_matplotlib()
    modules = modules_of(rows[0])
    figure = new_figure(WIDTH, 3.6 + 0.42 * len(modules))
    figure.suptitle(in_lines(title, LONGEST_TITLE), x=0.01, ha="left", fontsize=11)
    curve, lanes = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [3.0, 0.45 * len(modules) + 0.3]}
    )
    for (label, other), line in zip((others or {}).items(), (":", "--"), strict=False):
        _curve(curve, other, label, color=QUIET, linewidth=1.2, linestyle=line)
    _curve(curve, rows, "grown", color=INK, linewidth=1.8)
    _zoom(curve, rows)
    curve.set_ylabel("validation score")
    curve.legend(frameon=False, fontsize=8, loc="lower right")
    lanes.set_xlim(-0.5, rows[-1]["step"] + 0.5)
    for lane, module in enumerate(reversed(modules)):
        _lane(lanes, rows, module, lane)
    names = [in_lines(module, LONGEST_NAME) for module in reversed(modules)]
    lanes.set_yticks(range(len(modules)), names, fontsize=7.5 if "\n" in "".join(names) else 9)
    lanes.set_ylim(-0.5, len(modules) - 0.5)
    lanes.set_xlabel("epoch")
    _stage_legend(figure, rows, modules)
    for axes in (curve, lanes):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def in_lines(name: str, longest: int) -> str:
    """A name as a label: long ones are wrapped, after dots and slashes if there are any.

    Dollar signs are escaped, so that they do not begin a formula.
    """
    lines = [""]
    for part in re.findall(r"[^./ ]*[./ ]?", name):
        for chunk in textwrap.wrap(part, longest, drop_whitespace=False):
            if len(lines[-1]) + len(chunk) > longest:
                lines.append("")
            lines[-1] += chunk
    return "\n".join(lines).replace("$", r"\$")


def _steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run / METRICS) if row["kind"] == "step" and row["env"] == 0]


def _curve(axes: Any, rows: list[dict[str, Any]], label: str, **style: Any) -> None:
    measured = [(row["step"], row["val_score"]) for row in rows if row["val_score"] is not None]
    axes.plot(*zip(*measured, strict=True), label=label, **style)


def _zoom(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Leave the low scores of the first tenth of the run out of view."""
    later = [row["val_score"] for row in rows[len(rows) // 10 :] if row["val_score"] is not None]
    if later and max(later) > min(later):
        axes.set_ylim(bottom=min(later) - 0.1 * (max(later) - min(later)))


def _lane(axes: Any, rows: list[dict[str, Any]], module: str, height: int) -> None:
    """Coloured blocks for the stages in one module, and the blueprint's name where a seed begins.

    A name that would overlap the one before it is left out.
    """
    for stage, block in _blocks(rows, f"{module}.stage"):
        if stage in STAGE_COLOURS:
            axes.broken_barh([block], (height - 0.3, 0.6), color=STAGE_COLOURS[stage], linewidth=0)
    left, right = axes.get_xlim()
    per_letter, free = (right - left) * 0.065 / (0.8 * WIDTH), left
    for blueprint, (begin, _) in _blocks(rows, f"{module}.blueprint"):
        if blueprint and begin >= free:
            axes.text(
                begin + 0.2, height, blueprint, va="center", fontsize=7.5, color=INK, zorder=3,
                clip_on=True,
            )  # fmt: skip
            free = begin + per_letter * (len(blueprint) + 1)


def _blocks(rows: list[dict[str, Any]], column: str) -> list[tuple[Any, tuple[float, int]]]:
    """(value, (first step, number of steps)) for every sequence of equal values."""
    blocks = []
    for value, group in groupby(rows, key=lambda row: row[column]):
        own = list(group)
        blocks.append((value, (own[0]["step"] - 0.5, len(own))))
    return blocks


def _stage_legend(figure: Any, rows: list[dict[str, Any]], modules: list[str]) -> None:
    from matplotlib.patches import Patch

    seen = {row[f"{module}.stage"] for row in rows for module in modules}
    colours = {stage_name(s): colour for s, colour in STAGE_COLOURS.items() if s in seen}
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if patches:
        figure.legend(
            handles=patches, loc="outside lower center", ncols=len(patches), frameon=False,
            fontsize=8,
        )  # fmt: skip


Report = Mapping[str, Any]

ARM, CONTROL, BETTER, WORSE = "#1f77b4", "#9a9a9a", "#238b45", "#cb181d"
# Colours that differ in lightness too.
LINES = ("#4d4d4d", "#7a5195", "#ef8a17", "#2c7fb8", "#31a354", "#a6761d", "#e377c2", "#17becf")
SPACING = 0.012  # of the axis, between the intervals of one budget
SIGNIFICANT = 0.05


def draw_evaluation(path: Path, report: Report) -> Path:
    """Scores of every arm and key, or over the extra budget if there is one; below them the paired
    differences with their intervals."""
    arms, comparisons = report["arms"], report["comparisons"]
    budgets = bool(report.get("extra"))
    heights = [4.5 if budgets else 0.36 * len(arms) + 0.9, 0.36 * len(comparisons) + 0.9]
    figure = new_figure(9, sum(heights) + 0.4)
    if comparisons:
        scores, differences = figure.subplots(2, 1, height_ratios=heights)
        _draw_differences(differences, comparisons, report["score"])
        if (note := few_keys(report)) is not None:
            differences.set_xlabel(note, loc="left", fontsize=8, color=QUIET)
    else:
        scores = figure.subplots(1, 1)
    (_draw_budgets if budgets else _draw_scores)(scores, report)
    figure.savefig(path)
    return path


def _draw_scores(axes: Any, report: Report) -> None:
    def draw(arm: Mapping[str, Any], height: float) -> None:
        own = [t["test_score"] for t in report["trials"] if t["arm"] == arm["arm"]]
        # Fixed offsets keep the dots of one line apart.
        spread = [height + 0.24 * ((i * 7 % 11) / 10 - 0.5) * 2 for i in range(len(own))]
        colour = ARM if arm["control_of"] is None else CONTROL
        axes.scatter(own, spread, s=14, color=colour, alpha=0.45, linewidths=0)
        axes.plot([arm["test_score"]] * 2, [height - 0.32, height + 0.32], color=INK, linewidth=2)
        cost = f"{arm['params']:,.0f} p   {arm['train_macs'] / 1e6:,.0f} M"
        _in_margin(axes, cost, height, color=INK)

    def label(arm: Mapping[str, Any]) -> str:
        width = "" if arm["width"] is None else f" (width {arm['width']})"
        shape = f" ({'-'.join(map(str, arm['shape']))})" if arm.get("shape") else ""
        return in_lines(arm["arm"] + width + shape, LONGEST_NAME)

    title = f"{report['task']}: test {report['score']}, {_keys(report)} (dots), mean (line)"
    _draw_lines(axes, report["arms"], draw, label, title)
    heading = "parameters, multiply-adds\nof the whole training"
    _in_margin(axes, heading, len(report["arms"]) - 0.35, va="bottom", fontsize=7.5, color=QUIET)


def _draw_differences(axes: Any, comparisons: Sequence[Mapping[str, Any]], score: str) -> None:
    def draw(row: Mapping[str, Any], height: float) -> None:
        p = row["p_holm"]
        significant = p is not None and p < SIGNIFICANT
        colour = (BETTER if row["mean"] > 0 else WORSE) if significant else INK
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [height, height], color=colour, linewidth=1.6)
        axes.plot([row["mean"]], [height], "o", color=colour, markersize=5)
        text = "" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
        _in_margin(axes, text, height, color=colour)

    def label(row: Mapping[str, Any]) -> str:
        return in_lines(f"{row['arm']} - {row['versus']}", 2 * LONGEST_NAME)

    axes.axvline(0.0, color=QUIET, linewidth=1)
    title = f"paired differences of test {score}, 95 % interval, p after Holm"
    _draw_lines(axes, comparisons, draw, label, title)


def _draw_lines(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    draw: Callable[[Mapping[str, Any], float], None],
    label: Callable[[Mapping[str, Any]], str],
    title: str,
) -> None:
    """One horizontal line per row, from the top."""
    heights = list(range(len(rows) - 1, -1, -1))
    for height, row in zip(heights, rows, strict=True):
        draw(row, height)
    axes.set_yticks(heights, [label(row) for row in rows], fontsize=9)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _in_margin(axes: Any, text: str, height: float, **style: Any) -> None:
    """Text to the right of the axes."""
    style = {"va": "center", "fontsize": 8, **style}
    axes.annotate(text, (1.01, height), xycoords=("axes fraction", "data"), **style)


def _keys(report: Report) -> str:
    n = len(report["keys"])
    return f"{n} key{'s' if n > 1 else ''}"


def _draw_budgets(axes: Any, report: Report) -> None:
    """Mean test score of every arm over the extra budget, with its 95 % interval; dotted lines for
    the hosts without extra training."""
    extras = report["extra"]
    names = list(dict.fromkeys(arm["name"] for arm in report["arms"] if arm["extra"] is not None))
    colours = (colour for colour in LINES * len(names))
    span = extras[-1] - extras[0] or 1.0
    for i, name in enumerate(names):
        own = [arm for arm in report["arms"] if arm["name"] == name]
        colour = WORSE if name == report["reference"] else next(colours)
        x = [arm["extra"] + SPACING * span * (i - len(names) / 2) for arm in own]
        width = 2.4 if name in report["arms_wanted"] else 1.4
        scores = [arm["test_score"] for arm in own]
        axes.plot(x, scores, marker="o", markersize=4, label=name, color=colour, linewidth=width)
        for at, arm in zip(x, own, strict=True):
            if arm["test_low"] is not None:
                axes.plot([at, at], [arm["test_low"], arm["test_high"]], color=colour, linewidth=1)
    for arm in report["arms"]:
        if arm["extra"] is None:
            axes.axhline(arm["test_score"], color=QUIET, linestyle=":", linewidth=1.2)
            _in_margin(axes, arm["name"], arm["test_score"], color=QUIET)
    axes.set_xticks(extras, [f"{extra:g}" for extra in extras])
    label = "extra budget, as a share of the cost of training the host"
    axes.set_xlabel(label if not report["crossover"] else f"{label}\n{report['crossover']}")
    axes.xaxis.label.set(color=INK, fontsize=8.5, wrap=True)
    title = f"mean test {report['score']} of {_keys(report)}, 95 % interval"
    heading = f"{report['task']}, {report['scenario']}: {title}"
    axes.set_title(heading, loc="left", fontsize=10.5)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
