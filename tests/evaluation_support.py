"""A small evaluation, and what two of them have in common."""

from dataclasses import replace
from functools import cache
from typing import Any

from esper.proof.report import EvaluationReport
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.situation import Controller
from helpers import small_digits

SCRIPT = "1 GERMINATE r0c1 branch linear\n"


def make_arm(name: str) -> Controller:
    return ScriptedController(SCRIPT, "grow") if name == "grow" else make_controller(name)


@cache
def narrow_digits() -> tuple[Any, Any]:
    task, data = small_digits(96, 99)
    return replace(task, widths=(2, 3)), data


def numbers(report: EvaluationReport) -> dict[str, Any]:
    """All but the time it took."""
    rows = report.as_dict()
    for row in (*rows["arms"], *rows["trials"]):
        del row["cpu_seconds"]
    return rows


class Killed(Exception):
    pass
