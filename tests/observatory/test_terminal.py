from typing import Any

import pytest
from rich.console import Console

from esper.observatory.terminal import (
    PhaseProgress,
    StepProgress,
    say,
    seeds_table,
    summary_table,
)
from view_support import row


@pytest.fixture
def console() -> Console:
    return Console(width=120, record=True, force_terminal=False)


def test_progress_names_what_grows_and_where(console: Console) -> None:
    with StepProgress(console, "grown [/]", 12) as progress:
        progress.metrics(
            row(3, "BLENDING", "blocks[/].0") | row(3, "FOSSILIZED", "layer1") | row(3)
        )
    text = console.export_text()
    assert "grown [/]" in text
    assert "validation  53.0" in text
    assert "1 kept, conv_light blending in blocks[/].0" in text


def test_the_comparison_shows_a_score_that_is_absent_as_absent(console: Console) -> None:
    rows = [
        {"arm": "grown [/]", "test_score": 95.04, "params": 1138, "macs": 6736},
        {"arm": "host alone", "test_score": None, "params": 496, "macs": 3536},
    ]
    console.print(summary_table(rows, "accuracy"))
    heading, grown, host = console.export_text().splitlines()
    assert heading.split() == ["test", "accuracy", "parameters", "multiply-adds"]
    assert grown.split() == ["grown", "[/]", "95.0", "1,138", "6,736"]
    assert host.split() == ["host", "alone", "-", "496", "3,536"]


def test_kept_seeds_are_shown_with_what_they_are_worth(console: Console) -> None:
    seed: dict[str, Any] = {"blueprint": "branch", "module": "layer1", "slot_id": "r0c0"}
    seeds = [
        seed | {"params": 4900, "contribution": 8.081, "shapley": 7.5},
        seed | {"params": 5, "contribution": -0.5, "shapley": 0.25, "shapley_error": 0.125},
        seed | {"blueprint": "norm", "module": "x[/]y", "params": None, "shapley": None},
    ]
    console.print(seeds_table(seeds, "accuracy"))
    _, exact, sampled, unknown, caption = console.export_text().splitlines()
    assert exact.split() == ["branch", "in", "layer1", "(r0c0)", "4,900", "+8.08", "+7.50"]
    assert sampled.split()[4:] == ["5", "-0.50", "+0.25", "±", "0.12"]
    assert unknown.split() == ["norm", "in", "x[/]y", "(r0c0)", "-", "-", "-"]
    assert caption.strip() == "in points of validation accuracy"


def test_text_of_users_is_printed_as_it_is(console: Console) -> None:
    with PhaseProgress(console) as bar:
        bar.show("runs/x[/]y", 1, 2)
    say(console, "policy   runs/[bold]x[/]y")
    assert "policy   runs/[bold]x[/]y\n" in console.export_text()
