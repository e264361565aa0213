"""`esper watch` with Textual's pilot: keys, live and played again, every size, without colour."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from command_support import esper_here
from esper.observatory import watch_app
from esper.observatory.formatting import HOST, POLICY
from esper.observatory.run_directory import RunDirectory
from esper.observatory.watch_app import WatchApp
from esper.observatory.watch_text import columns_of, curve, sparkline
from view_support import lines_of, row, write_evaluation_folder, write_growth, write_training

Act = Callable[[WatchApp, Pilot], Awaitable[None]]


def watching(run: Path, act: Act, size: tuple[int, int] = (80, 24)) -> None:
    async def play() -> None:
        app = WatchApp(run)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await act(app, pilot)

    asyncio.run(play())


@pytest.fixture(autouse=True)
def the_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests call what the clock would."""
    monkeypatch.setattr(watch_app, "POLL", 3600.0)


def text_of(app: WatchApp, name: str) -> str:
    return str(app.page.query_one(f"#{name}", Static).content)


def test_epochs_are_scrubbed(tmp_path: Path):
    async def act(app: WatchApp, pilot: Pilot) -> None:
        assert "conv_light kept, alpha 1.00, contribution +2.5 points" in text_of(app, "network")
        await pilot.press("left", "left")
        assert "epoch 10 " in text_of(app, "network")
        await pilot.press("home", "right")
        assert "epoch 1 " in text_of(app, "network")
        await pilot.press("end")
        assert "epoch 12 " in text_of(app, "network")

    watching(write_growth(tmp_path / "run"), act)


def test_a_live_run_is_followed_paused_and_lost(tmp_path: Path):
    async def act(app: WatchApp, pilot: Pilot) -> None:
        assert "No epoch has ended yet" in text_of(app, "network")
        record.metrics(row(0))
        record.metrics(row(1, "TRAINING"))
        app.poll()
        assert "epoch 1 " in text_of(app, "network")
        assert "running" in text_of(app, "heading")
        await pilot.press("space")
        record.metrics(row(2, "BLENDING"))
        app.poll()
        assert "epoch 1 " in text_of(app, "network")
        assert "paused" in text_of(app, "heading")
        assert "1/9 epochs" in text_of(app, "heading")
        await pilot.press("space")
        app.poll()
        assert "epoch 2 " in text_of(app, "network")
        record.close()  # as the kernel does for a process that was killed
        app.poll()
        assert "stopped" in text_of(app, "heading")
        assert "its process ended before the run did" in text_of(app, "heading")
        # Another run takes its place.
        shutil.rmtree(tmp_path / "run")
        write_growth(tmp_path / "run", steps=5)
        app.poll()
        assert "epoch 5 " in text_of(app, "network")
        shutil.rmtree(tmp_path / "run")
        app.poll()
        assert "the folder of the run is gone" in text_of(app, "heading")
        assert "epoch 5 " in text_of(app, "network")

    record = RunDirectory.create(tmp_path / "run", {"task": "digits", "steps": 9, "arm": "grown"})
    watching(tmp_path / "run", act)


def test_environments_rounds_and_the_policy(tmp_path: Path):
    async def act(app: WatchApp, pilot: Pilot) -> None:
        table = app.page.query_one(DataTable)
        assert app.view == "environments"
        assert [str(cell) for cell in table.get_row_at(3)] == [
            "3", "5", "55.0", "+0.300", "500", "K ",
        ]  # fmt: skip
        await pilot.press("down", "down", "enter")
        assert app.view == "network"
        assert app.data["episode"]["env"] == 2
        await pilot.press("e", "left")
        assert app.data["episode"]["round"] == 1
        await pilot.press("home")
        assert app.data["episode"]["round"] == 0
        await pilot.press("end")
        assert app.data["episode"]["round"] == 2
        await pilot.press("p")
        assert app.view == "policy"
        lines = text_of(app, "policy-text").splitlines()
        assert lines[0].startswith("round 2")
        assert next(line for line in lines if line.startswith("score")).split() == [
            "score", "82", "▁▁▁▅▅▅███"
        ]  # fmt: skip
        assert next(line for line in lines if line.startswith("gradient norm")).split()[2] == "-"

    watching(write_training(tmp_path / "run", rounds=3), act)


def test_events_are_listed_and_quantities_explained(tmp_path: Path):
    async def act(app: WatchApp, pilot: Pilot) -> None:
        await pilot.press("v")
        assert "conv_light in blocks.0 planted" in text_of(app, "events-text")
        await pilot.press("question_mark")
        explained = str(app.screen.query_one("#help", Static).content)
        for quantity in (*HOST.values(), *POLICY.values()):
            assert f"{quantity.label}: {quantity.meaning}. Bad: {quantity.bad}." in explained
        app.mark = ""  # something changes while the explanation is open
        app.poll()
        await pilot.press("escape")
        assert app.screen is app.page

    watching(write_growth(tmp_path / "run"), act)


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 60), (20, 6)])
def test_every_size(tmp_path: Path, size: tuple[int, int]):
    async def act(app: WatchApp, pilot: Pilot) -> None:
        await pilot.resize_terminal(*size)
        await pilot.pause()
        lines = text_of(app, "network").splitlines()
        assert max(len(line) for line in lines if "·" in line or "█" in line) <= max(26, size[0])
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        # Keys are shown whole in 80 columns.
        assert "Quit" in "".join(strip.text for strip in app.page._compositor.render_strips())

    watching(write_growth(tmp_path / "run", steps=300), act)


def test_without_colour_letters_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def act(app: WatchApp, pilot: Pilot) -> None:
        assert app.no_color
        assert "···PPPPPPLLLLLLBBBBBBTTTTTTKKK" in text_of(app, "network")

    monkeypatch.setenv("NO_COLOR", "1")
    watching(write_growth(tmp_path / "run"), act)


def test_names_are_text(tmp_path: Path):
    async def act(app: WatchApp, pilot: Pilot) -> None:
        for name in ("network", "heading", "events-text"):
            assert "\x1b" not in text_of(app, name)
            assert "\u202e" not in text_of(app, name)
        assert "[red]\\u001b" in text_of(app, "network")

    evil = "[red]\x1b[2J\u202e" + "x" * 10_000
    watching(write_growth(tmp_path / "run", module=evil, task=evil, controller=evil), act)


def test_damage_is_said_and_the_rest_shown(tmp_path: Path):
    async def act(app: WatchApp, pilot: Pilot) -> None:
        assert "outcomes.jsonl is missing" in text_of(app, "heading")
        assert "epoch 12 " in text_of(app, "network")
        (run / "metrics.jsonl").write_text(lines_of([row(0)]) + "garbage\n")
        app.poll()
        assert "damaged" in text_of(app, "heading")
        assert "epoch 0 " in text_of(app, "network")

    run = write_growth(tmp_path / "run")
    (run / "outcomes.jsonl").unlink()
    watching(run, act)


def test_columns_hold_every_frame_once():
    assert columns_of(4, 5) == [range(i, i + 1) for i in range(4)]
    assert columns_of(2, 7) == [range(0, 1)] * 3 + [range(1, 2)] * 3
    wide = columns_of(1000, 60)
    assert len(wide) == 60
    assert [i for column in wide for i in column] == list(range(1000))
    assert sparkline([1.0, None, 2.0]) == "▁ █"
    assert sparkline([None]) == ""
    assert str(curve([0.0, 1.0, None], [False] * 3, 2)).splitlines() == [
        "           1.0  █ ",
        "           0.0 ▁█ ",
    ]


def test_what_cannot_be_watched_is_said_in_a_sentence(tmp_path, monkeypatch, capsys):
    assert esper_here(monkeypatch, "watch", str(tmp_path)) == 2
    assert "is not a run" in capsys.readouterr().err
    evaluation = write_evaluation_folder(tmp_path / "evaluation")
    assert esper_here(monkeypatch, "watch", str(evaluation)) == 2
    assert "is an evaluation; see it with" in capsys.readouterr().err
    monkeypatch.setitem(os.sys.modules, "textual.app", None)
    monkeypatch.delitem(os.sys.modules, "esper.observatory.watch_app")
    assert esper_here(monkeypatch, "watch", str(write_growth(tmp_path / "run"))) == 2
    assert "pip install 'esper-grow[watch]'" in capsys.readouterr().err
