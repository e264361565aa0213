"""Decisions of a policy in the views: as recorded, and safe whatever is recorded."""

import json
from pathlib import Path
from typing import Any

from browser_support import browser_page, needs_browser
from esper.leyline.events import Decided
from esper.observatory.describe import describe
from esper.observatory.explain import decision_row
from esper.observatory.report import write_report
from view_support import write_growth


def decided(step: int, **changes: Any) -> dict[str, Any]:
    event = Decided(
        env=0,
        step=step,
        taken=("WAIT", None, None, None),
        value=1.25,
        supposed=True,
        blocks=("training",),
        entries=("epoch / epochs",),
        numbers=(0.5,),
        unusual=(-1.0,),
        heads=("op", "op", "op", "slot", "blueprint"),
        choices=("WAIT", "GERMINATE", "CULL", "blocks.0", "conv_light"),
        probabilities=(0.7, 0.3, None, 0.9, 0.6),
        reasons=("", "", "no live seed is old enough", "", ""),
        left_out=3,
    )
    return event.row() | changes


def with_decisions(folder: Path, *events: dict[str, Any]) -> Path:
    run = write_growth(folder)
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    return run


def test_a_line_has_what_was_done_and_what_came_second() -> None:
    line = decision_row(decided(4))
    assert line == {
        "step": 4,
        "value": 1.25,
        "action": [["WAIT", 0.7]],
        "second": [["GERMINATE", 0.3], ["blocks.0", 0.9], ["conv_light", 0.6]],
    }
    planted = decided(4, taken=["GERMINATE", "blocks.0", "conv_light", "linear"], supposed=False)
    line = decision_row(planted)
    assert line["action"] == [
        ["GERMINATE", 0.3],
        ["blocks.0", 0.9],
        ["conv_light", 0.6],
        ["linear", None],
    ]
    assert line["second"] == [["WAIT", 0.7]]


def test_what_is_no_decision_breaks_nothing() -> None:
    for event in ({}, {"taken": 3, "heads": "x", "choices": None}, decided(1, probabilities=[{}])):
        assert decision_row(event)["second"] in ([], [["GERMINATE", 0.3]])


def test_the_episode_lists_those_of_its_environment(tmp_path: Path) -> None:
    run = with_decisions(tmp_path / "run", decided(3), decided(4), decided(4, env=7))
    assert [line["step"] for line in describe(run)["episode"]["decisions"]] == [3, 4]


@needs_browser
def test_the_page_lists_them(tmp_path: Path) -> None:
    grown = write_report(with_decisions(tmp_path / "run", decided(4)))
    with browser_page() as (page, noise):
        page.goto(grown.as_uri())
        table = page.get_by_role("table", name="Decisions of the policy")
        assert table.get_by_role("row").nth(1).inner_text().split("\t") == [
            "4",
            "WAIT 0.70",
            "+1.25",
            "GERMINATE 0.30, blocks.0 0.90, conv_light 0.60",
        ]
        assert noise.errors == []
