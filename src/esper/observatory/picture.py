"""The picture of a run: its score by epoch, and the stages of every slot below."""

import re
import textwrap
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.formatting import STAGE_COLOURS, modules_of, stage_name
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
