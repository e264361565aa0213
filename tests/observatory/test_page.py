"""The web page in a real browser: live, by keyboard, on a phone, in the dark, for everybody."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from browser_support import browser_page, needs_browser
from esper.observatory.run_directory import RunDirectory
from serve_support import serving
from view_support import (
    lines_of,
    outcome,
    row,
    write_evaluation_folder,
    write_growth,
    write_training,
)

pytestmark = [pytest.mark.heavy, needs_browser]
AXE = (Path(__file__).parents[1] / "vendor" / "axe.min.js").read_text()
WRITER = """
import sys, time
from pathlib import Path
from esper.observatory.run_directory import RunDirectory
record = RunDirectory.create(Path(sys.argv[1]), {"task": "digits", "steps": 9, "arm": "grown"})
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_growth(tmp_path / "runs" / "grown")
    write_growth(tmp_path / "runs" / "other")
    write_training(tmp_path / "runs" / "trained", rounds=4)
    write_evaluation_folder(tmp_path / "runs" / "evaluated")
    return tmp_path / "runs"


def test_a_live_run_appears_grows_and_finishes(tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    with serving(runs) as served, browser_page() as (page, noise):
        page.goto(served.url)
        page.get_by_text("No runs here yet").wait_for()
        settings = {"task": "digits", "controller": "heuristic", "steps": 4, "arm": "grown"}
        with RunDirectory.create(runs / "live", settings) as record:
            for step in (0, 1):
                record.metrics(row(step))
            page.get_by_role("link", name="live").click()
            page.get_by_role("img", name="Network at epoch 1").wait_for()
            assert page.locator(".state").inner_text() == "running"
            record.metrics(row(2, "BLENDING", **{"blocks.0.alpha": 0.4}))
            page.get_by_role("img", name="blocks.0: conv_light blending, alpha 0.40").wait_for()
            with (runs / "live" / "metrics.jsonl").open("a") as file:
                file.write('{"kind": "step", "env": 0, "st')  # a line that is still on its way
            page.wait_for_timeout(1200)
            assert page.get_by_role("img", name="Network at epoch 2").count() == 1
            with (runs / "live" / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row(4, "FOSSILIZED"))[28:] + "\n")
            (runs / "live" / "outcomes.jsonl").write_text(lines_of([outcome(ended="finished")]))
        page.get_by_text("finished", exact=True).wait_for()
        assert noise.errors == []
        # Another run takes its place, and is killed; then all of it goes.
        shutil.rmtree(runs / "live")
        page.get_by_role("alert").get_by_text("there is no such run").wait_for()
        noise.errors.clear()  # the 404 that said so
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(runs / "live")], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "held\n"
            page.get_by_text("No epoch has ended yet").wait_for()
            page.get_by_text("running", exact=True).wait_for()
            writer.kill()
        page.get_by_text("stopped", exact=True).wait_for()
        page.get_by_text("its process ended before the run did").wait_for()
        assert noise.errors == []
        assert noise.foreign(served.url) == []


def test_search_compare_and_deep_links(runs: Path):
    with serving(runs) as served, browser_page() as (page, noise):
        page.goto(served.url)
        rows = page.locator("tbody tr")
        page.get_by_role("link", name="grown").wait_for()
        assert rows.count() == 4
        page.get_by_label("Search").fill("train")
        assert rows.count() == 1
        page.get_by_label("Search").fill("")
        page.get_by_role("button", name="growth", exact=True).click()
        assert rows.count() == 2
        page.get_by_label("compare grown").check()
        page.get_by_label("compare other").check()
        page.get_by_role("button", name="Compare 2 selected").click()
        page.get_by_role("heading", name="2 runs compared").wait_for()
        pairs = page.get_by_role("table", name="Paired differences").locator("tbody tr")
        assert pairs.inner_text().split("\t")[1:3] == ["1", "0.00"]
        page.goto(f"{served.url}/#run=trained&round=1&env=2&epoch=3")
        page.get_by_role("heading", name="environment 2 in round 1").wait_for()
        page.get_by_role("img", name="Network at epoch 3").wait_for()
        page.get_by_role("button", name="3: score").click()
        page.get_by_role("heading", name="environment 3 in round 1").wait_for()
        assert "env=3" in page.url
        page.get_by_role("slider", name="Round").fill("2")
        page.get_by_role("heading", name="environment 3 in round 2").wait_for()
        page.go_back()
        page.get_by_role("heading", name="environment 3 in round 1").wait_for()
        assert noise.errors == []
        assert noise.foreign(served.url) == []


def test_plots_zoom_together(runs: Path):
    def range_of(title: str) -> str:
        return page.locator(f".plot:has(h3:text-is('{title}')) [data-range]").get_attribute(
            "data-range"
        )

    with serving(runs) as served, browser_page() as (page, noise):
        page.goto(f"{served.url}/#run=trained")
        page.get_by_role("heading", name="Policy").wait_for()
        assert range_of("Return") == range_of("KL") == "0 3"
        over = page.locator(".plot:has(h3:text-is('Return')) .u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        page.mouse.move(box["x"] + 5, box["y"] + 30)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30, steps=5)
        page.mouse.up()
        page.wait_for_timeout(300)
        assert range_of("Return") != "0 3"
        assert range_of("Return") == range_of("KL")
        assert noise.errors == []


def test_keyboard_alone_is_enough(runs: Path):
    with serving(runs) as served, browser_page() as (page, noise):
        page.goto(served.url)
        page.get_by_role("link", name="grown").wait_for()
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "grown":
                break
        page.keyboard.press("Enter")
        page.get_by_role("slider", name="Epoch").focus()
        page.keyboard.press("Home")
        page.get_by_role("img", name="Network at epoch 0").wait_for()
        page.keyboard.press("ArrowRight")
        page.get_by_role("img", name="Network at epoch 1.").wait_for()
        assert "epoch=1" in page.url
        assert noise.errors == []


ADDRESSES = ["", "#run=grown", "#run=trained", "#run=evaluated", "#compare=grown&compare=other"]


PHONE = {"viewport": {"width": 390, "height": 800}, "color_scheme": "light"}


@pytest.mark.parametrize("options", [{"color_scheme": "dark"}, PHONE])
def test_pages_are_accessible_and_nothing_overflows(runs: Path, options: dict[str, Any]):
    """axe-core finds no serious violation: light and dark, at full width and on a phone."""
    with serving(runs) as served, browser_page(bypass_csp=True, **options) as (page, noise):
        for address in ADDRESSES:
            page.goto(f"{served.url}/{address}")
            page.reload()
            page.locator("h1").wait_for()
            page.evaluate(AXE)
            found = page.evaluate("axe.run().then((result) => result.violations)")
            serious = [
                (one["id"], [node["html"][:200] for node in one["nodes"]])
                for one in found
                if one["impact"] in ("serious", "critical")
            ]
            assert serious == [], address
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= page.viewport_size["width"], address
        assert noise.errors == []


def test_dark_and_light(runs: Path):
    paper = "getComputedStyle(document.body).backgroundColor"
    with serving(runs) as served, browser_page(color_scheme="dark") as (page, noise):
        page.goto(f"{served.url}/#run=grown")
        page.get_by_role("img", name="Network at epoch 12").wait_for()
        assert page.evaluate(paper) == "rgb(20, 23, 27)"
        page.get_by_role("button", name="Dark or light").click()
        assert page.evaluate(paper) == "rgb(255, 255, 255)"
        assert noise.errors == []


def test_names_are_text(tmp_path: Path):
    evil = "<img src=x onerror=\"document.title='owned'\">\u202e"
    write_growth(tmp_path / "runs" / evil.replace("/", ""), module=evil, task=evil, controller=evil)
    with serving(tmp_path / "runs") as served, browser_page() as (page, noise):
        page.goto(served.url)
        page.get_by_role("link", name="<img").click()
        page.get_by_role("img", name="Network at epoch 12").wait_for()
        assert page.locator("img").count() == 0
        assert "owned" in page.title()  # as the text that it is
        assert page.title().startswith("<img")
        assert "\u202e" not in page.locator("body").inner_text()
        assert noise.errors == []
        assert noise.foreign(served.url) == []
