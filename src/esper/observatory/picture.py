"""A picture of a run's growth: the score over time, and every slot's stages under it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.run_directory import METRICS, PICTURE, read_rows

STAGE_COLOURS = {
    "GERMINATED": "#9ecae1",
    "TRAINING": "#4292c6",
    "BLENDING": "#fdae6b",
    "HOLDING": "#e6550d",
    "FOSSILIZED": "#31a354",
    "CULLED": "#d73027",
    "EMBARGOED": "#bdbdbd",
    "RESETTING": "#d9d9d9",
}
INK, QUIET = "#222222", "#8a8a8a"


def require_matplotlib() -> None:
    """Raises ConfigError with the cure if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures need matplotlib; install it with: pip install 'esper-grow[plot]'"
        )


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that size in inches, apart from any window or global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_growth(run: Path, title: str, compare_with: dict[str, Path] | None = None) -> Path:
    """Draw `run`'s environment 0 to growth.png in its folder and give the path.

    `compare_with` maps labels to other run folders whose score is drawn thinly beside it. Raises
    ConfigError if matplotlib is not installed or there is nothing to draw.
    """
    require_matplotlib()
    rows = _steps(run)
    if not rows:
        raise ConfigError(f"{run} holds no steps yet; there is nothing to draw")
    slots = [key.removesuffix(".stage") for key in rows[0] if key.endswith(".stage")]
    figure = new_figure(8, 3.6 + 0.42 * len(slots))
    curve, lanes = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [3.0, 0.45 * len(slots) + 0.3]}
    )
    for (label, other), line in zip((compare_with or {}).items(), (":", "--"), strict=False):
        _curve(curve, _steps(other), label, color=QUIET, linewidth=1.2, linestyle=line)
    _curve(curve, rows, "grown", color=INK, linewidth=1.8)
    _zoom(curve, rows)
    curve.set_title(title, loc="left", fontsize=11)
    curve.set_ylabel("validation score")
    curve.legend(frameon=False, fontsize=8, loc="lower right")
    for lane, slot in enumerate(slots):
        _lane(lanes, rows, slot, len(slots) - 1 - lane)
    lanes.set_yticks(range(len(slots)), reversed(slots), fontsize=9)
    lanes.set_ylim(-0.5, len(slots) - 0.5)
    lanes.set_xlim(-0.5, rows[-1]["step"] + 0.5)
    lanes.set_xlabel("epoch")
    _stage_legend(figure, rows, slots)
    for axes in (curve, lanes):
        axes.spines[["top", "right"]].set_visible(False)
    target = run / PICTURE
    figure.savefig(target)
    return target


def _steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run / METRICS) if row["kind"] == "step" and row["env"] == 0]


def _curve(axes: Any, rows: list[dict[str, Any]], label: str, **style: Any) -> None:
    measured = [(row["step"], row["val_score"]) for row in rows if row["val_score"] is not None]
    axes.plot(*zip(*measured, strict=True), label=label, **style)


def _zoom(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Leave the first tenth of the run out of view where it lies far below the rest."""
    later = [row["val_score"] for row in rows[len(rows) // 10 :] if row["val_score"] is not None]
    if later and max(later) > min(later):
        axes.set_ylim(bottom=min(later) - 0.1 * (max(later) - min(later)))


def _lane(axes: Any, rows: list[dict[str, Any]], slot: str, height: int) -> None:
    """Coloured blocks for the stages of one slot, with the blueprint's name where a life begins."""
    previous = None
    for row in rows:
        stage, blueprint = row[f"{slot}.stage"], row[f"{slot}.blueprint"]
        if stage in STAGE_COLOURS:
            axes.barh(height, 1.0, left=row["step"] - 0.5, height=0.6, color=STAGE_COLOURS[stage])
        if blueprint and blueprint != previous:
            axes.text(
                row["step"] - 0.3, height, blueprint, va="center", fontsize=7.5, color=INK, zorder=3
            )
        previous = blueprint


def _stage_legend(figure: Any, rows: list[dict[str, Any]], slots: list[str]) -> None:
    from matplotlib.patches import Patch

    seen = {row[f"{slot}.stage"] for row in rows for slot in slots}
    patches = [
        Patch(color=colour, label=stage.lower())
        for stage, colour in STAGE_COLOURS.items()
        if stage in seen
    ]
    if patches:
        figure.legend(
            handles=patches, loc="outside lower center", ncols=len(patches), frameon=False,
            fontsize=8,
        )  # fmt: skip
