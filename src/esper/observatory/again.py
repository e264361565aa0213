"""The command that makes a run or an evaluation again."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.observatory.looks import plain
from esper.observatory.reading import whole
from esper.observatory.run_directory import CONFIG

LONGEST = 4000


def copied(command: str | None) -> str | None:
    """A command is there to be copied, so it is whole, or it is not there."""
    shown = None if command is None else plain(command, LONGEST)
    return None if shown is None or shown.endswith("…") else shown


def run_again(folder: Path, kind: str, config: Mapping[str, Any]) -> str | None:
    """A command that makes the same run again in another folder; None if that is not known."""
    if kind == "training":
        settings = shlex.quote(str(folder / CONFIG))
        return f"esper train ppo --config {settings} --out runs/again"
    given = {n: v for n, v in config.items() if n not in ("out", "overwrite", "arm", "command")}
    if kind == "growth" and given:
        return " ".join(["esper grow", *_flags(given), "--out runs/again"])
    if config.get("command") == "record":
        return " ".join(["esper train record", *_flags(given), "--out runs/again"])
    return None


def evaluate_again(report: Mapping[str, Any]) -> str:
    arms = [arm["arm"] for arm in report["arms"] if not arm["control_of"]]
    extra = ",".join(f"{share:g}" for share in report.get("extra") or ())
    given = {
        "task": report.get("task"),
        "scenario": report.get("scenario"),
        "extra": extra or None,
        "arms": ",".join(report.get("arms_wanted") or arms),
        "keys": whole(report, "keys_wanted"),
        "steps": whole(report, "steps"),
        "tune": len(report.get("learning_rates") or ()) > 1,
        "controls": any(arm["control_of"] for arm in report["arms"]),
        "control_for": report.get("reference"),
    }
    return " ".join(["esper evaluate", *_flags(given), "--out runs/again"])


def _flags(given: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            words += [f"--{flag}"] if value else [f"--no-{flag}"]
        elif value is not None:
            words.append(f"--{flag} {shlex.quote(str(value))}")
    return words
