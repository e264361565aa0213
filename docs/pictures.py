"""Draw the pictures of the views for the documents, from real runs.

    python docs/pictures.py [--runs FOLDER] [--out docs/images]
    python docs/pictures.py --claims          # only the forest plot of the claims
    python docs/pictures.py --cost            # only the plot of what growth costs

Missing runs are made first, which takes some minutes. Needs Chromium. The two plots need neither:
they show the stored rows of the claims, and what `benchmarks/cost.py --record` wrote.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "claims"))

from esper.observatory.watch_app import WatchApp
from serve_support import serving
from summary import Effect, effects

ESPER = [sys.executable, "-c", "from esper.cli import main; main()"]
GROWN, TRAINED = "digits-heuristic", "ppo-digits"
EVALUATED = "evaluate-digits"
COST = Path(__file__).parents[1] / "benchmarks" / "results" / "cost.json"
RUNS = {
    GROWN: ["grow", "--task", "digits"],
    TRAINED: ["train", "ppo", "--rounds", "24", "--envs", "6", "--steps", "14"],
    EVALUATED: ["evaluate", "--keys", "4", "--steps", "14"],
}
# file: (address, width, height or None for the whole page, dark)
PAGES: dict[str, tuple[str, int, int | None, bool]] = {
    "view-run.png": (f"run={GROWN}&epoch=25", 1080, 820, False),
    "view-training.png": (f"run={TRAINED}&epoch=9", 1080, 1500, False),
    "view-evaluation.png": (f"run={EVALUATED}", 1080, 1130, True),
}
# file: (run, columns, lines, keys)
SCREENS: dict[str, tuple[str, int, int, list[str]]] = {
    "watch-run.png": (GROWN, 80, 24, ["left"] * 5),
}


def make_runs(folder: Path) -> None:
    for name, words in RUNS.items():
        if not (folder / name).exists():
            subprocess.run([*ESPER, *words, "--out", str(folder / name)], check=True)


def draw_page(page: Page, url: str, name: str, out: Path) -> None:
    address, width, height, dark = PAGES[name]
    page.set_viewport_size({"width": width, "height": height or 900})
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.goto("about:blank")
    page.goto(f"{url}/#{address}")
    page.locator("h1").wait_for()
    page.wait_for_timeout(900)
    page.screenshot(path=out / name, full_page=height is None)


async def screen_as_svg(run: Path, columns: int, lines: int, keys: list[str]) -> str:
    app = WatchApp(run)
    async with app.run_test(size=(columns, lines)) as pilot:
        await pilot.pause()
        await pilot.press(*keys)
        await pilot.pause()
        return app.export_screenshot()


def draw_screen(page: Page, svg: str, path: Path) -> None:
    page.set_viewport_size({"width": 900, "height": 700})
    page.set_content(f"<body style='margin:0;width:900px'>{svg}</body>")
    page.locator("svg").first.screenshot(path=path)


def draw_claims(shown: Sequence[Effect], path: Path) -> None:
    """A forest plot: one line per effect with its 95 % interval."""
    figure = Figure(figsize=(8.4, 0.34 * len(shown) + 1.1))
    axis = figure.subplots()
    heights = range(len(shown), 0, -1)
    for height, each in zip(heights, shown, strict=True):
        certain = each.p < 0.05
        colour = ("#238b45" if each.mean > 0 else "#cb181d") if certain else "#636363"
        axis.plot([each.low, each.high], [height, height], color=colour, linewidth=1.8)
        axis.plot(each.mean, height, "s", color=colour, markersize=5)
        words = f"{each.in_words}   n = {each.n} {each.units}"
        right = axis.get_yaxis_transform()
        axis.text(1.02, height, words, transform=right, va="center", fontsize=8, color=colour)
    axis.axvline(0.0, color="0.5", linewidth=1)
    axis.set_yticks([*heights], [f"{each.claim}  {each.what}" for each in shown], fontsize=8.5)
    axis.set_xlabel("points of test accuracy, 95 % interval; grey: p (Holm) is 0.05 or more")
    axis.grid(axis="x", color="0.92")
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def draw_cost(recorded: dict[str, Any], path: Path) -> None:
    """An epoch over that of a plain loop, for more slots, kept seeds and parameters."""
    figure = Figure(figsize=(9.0, 2.8), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    curves = (
        ("over_slots", "slots, no seed", "log"),
        ("over_kept", "kept seeds", "linear"),
        ("over_params", "million parameters, no seed", "log"),
    )
    for axis, (name, label, scale) in zip(axes, curves, strict=True):
        points = recorded[name]["figures"]
        axis.plot([float(x) for x in points], points.values(), "o-", color="#238b45", markersize=4)
        axis.axhline(1.0, color="0.5", linewidth=1)
        axis.set_xscale(scale)
        axis.set_xlabel(label)
        axis.grid(color="0.92")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(0.9, 1.4)
    axes[0].set_ylabel("CPU time of an epoch,\nover a plain loop")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--claims", action="store_true", help="only the forest plot of the claims")
    parser.add_argument("--cost", action="store_true", help="only the plot of what growth costs")
    given: Any = parser.parse_args()
    given.out = given.out.resolve()
    if not given.cost:
        draw_claims(effects(), given.out / "claims.png")
    if not given.claims:
        draw_cost(json.loads(COST.read_text()), given.out / "cost.png")
    if given.claims or given.cost:
        return
    make_runs(given.runs)
    os.chdir(given.runs)  # the pictures then show no folders of this machine
    screens = {
        name: asyncio.run(screen_as_svg(Path(run), *size, keys))
        for name, (run, *size, keys) in SCREENS.items()
    }
    with sync_playwright() as playwright, serving(Path.cwd()) as served:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        for name in PAGES:
            draw_page(page, served.url, name, given.out)
        page = browser.new_page()  # without the server's content policy
        for name, svg in screens.items():
            draw_screen(page, svg, given.out / name)
        browser.close()


if __name__ == "__main__":
    main()
