"""The report: one file that needs nothing else, whatever the names in the run are."""

import json
import re
from pathlib import Path

import pytest

from browser_support import browser_page, needs_browser
from command_support import esper_here
from esper.leyline import ConfigError
from esper.observatory.report import write_report
from view_support import write_evaluation_folder, write_growth, write_training

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u202e\x1b[2J"


def runs(folder: Path) -> list[Path]:
    return [
        write_growth(folder / "grown"),
        write_training(folder / "trained"),
        write_evaluation_folder(folder / "evaluated"),
    ]


def test_a_report_is_one_small_file_with_its_data(tmp_path: Path):
    for run in runs(tmp_path):
        text = write_report(run).read_text()
        assert len(text) < 2_000_000
        data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
        assert data is not None
        assert json.loads(data[1])["run"]["state"] == "finished"
        assert not re.search(r'(src|href)="', text)
        assert text.count("</script>") == 2
        assert not list(run.glob("*.unfinished"))


def test_names_of_users_are_data_and_not_markup(tmp_path: Path):
    text = write_report(write_growth(tmp_path / "run", task=EVIL)).read_text()
    assert "<img" not in text
    assert "\u202e" not in text
    assert "\x1b" not in text


def test_a_report_needs_a_run(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="neither a run nor an evaluation"):
        write_report(tmp_path)
    run = write_growth(tmp_path / "run")
    assert esper_here(monkeypatch, "report", str(run)) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")


@pytest.mark.heavy
@needs_browser
def test_the_report_works_in_a_browser(tmp_path: Path):
    grown, trained, evaluated = runs(tmp_path)
    evil = write_growth(tmp_path / "evil", module=EVIL, task=EVIL, controller=EVIL)
    with browser_page() as (page, noise):
        page.goto(write_report(grown).as_uri())
        assert page.locator("h1").inner_text() == str(grown)
        assert page.get_by_role("img", name="Network at epoch 12").count() == 1
        slider = page.get_by_role("slider", name="Epoch")
        slider.focus()
        for _ in range(6):
            page.keyboard.press("ArrowLeft")
        page.get_by_role("img", name="blocks.0: conv_light blending, alpha 0.60").wait_for()
        page.locator(".u-value", has_text=re.compile("^6$")).first.wait_for()
        page.get_by_role("button", name="Play").click()
        page.get_by_role("img", name="Network at epoch 12").wait_for()
        page.get_by_role("button", name="Play").wait_for()
        for run, word in ((trained, "Policy"), (evaluated, "Differences on paired keys")):
            page.goto(write_report(run).as_uri())
            page.get_by_role("heading", name=word).wait_for()
        page.goto(write_report(evil).as_uri())
        page.get_by_role("img", name="Network at epoch 12").wait_for()
        assert page.title() == f"{evil} - Esper"
        assert page.locator("img").count() == 0
        assert "<script>" in page.locator(".network title").first.text_content()
        assert noise.errors == []
        assert noise.foreign("file://") == []


@pytest.mark.heavy
@needs_browser
def test_the_report_may_load_and_send_nothing(tmp_path: Path):
    with browser_page() as (page, noise):
        page.goto(write_report(write_growth(tmp_path / "run")).as_uri())
        tried = """fetch("http://example.invalid/").then(() => "sent", () => "refused")"""
        assert page.evaluate(tried) == "refused"
        assert any("Content Security Policy" in text for text in noise.errors)
