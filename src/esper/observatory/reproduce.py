"""The command that repeats a run or an evaluation."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.observatory.reading import integer
from esper.observatory.run_directory import CONFIG
from esper.observatory.runs import RunContents, controllers

OUT = "--out runs/repeated"


def run_command(folder: Path, run: RunContents) -> str | None:
    """The command that repeats a run in another folder; None if it is unknown."""
    if run.kind == "training":
        return f"esper train ppo --config {shlex.quote(str(folder / CONFIG))} {OUT}"
    skip = ("out", "overwrite", "arm", "command")
    options = {name: value for name, value in run.config.items() if name not in skip}
    if run.kind == "growth" and options:
        return _command("esper grow", options)
    if run.config.get("command") == "record":
        return _command("esper train record", options)
    return None


def evaluation_command(report: Mapping[str, Any]) -> str:
    options = {
        "task": report.get("task"),
        "scenario": report.get("scenario"),
        "extra": ",".join(f"{share:g}" for share in report.get("extra") or ()) or None,
        "arms": ",".join(controllers(report)),
        "keys": integer(report, "keys_wanted"),
        "steps": integer(report, "steps"),
        "tune": len(report.get("learning_rates") or ()) > 1,
        "controls": any(arm["control_of"] for arm in report["arms"]),
        "control_for": report.get("reference"),
    }
    return _command("esper evaluate", options)


def _command(command: str, options: Mapping[str, Any]) -> str:
    words = [command]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag} {shlex.quote(str(value))}")
    return " ".join([*words, OUT])
