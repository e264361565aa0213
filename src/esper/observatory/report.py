"""One run or evaluation on one page: a self-contained HTML file, or Markdown."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.describe import describe
from esper.observatory.explain import choices_text
from esper.observatory.formatting import format_columns, format_number
from esper.observatory.reading import number
from esper.observatory.run_directory import PAGE

LIBRARIES = ("vendor/htm-preact.umd.js", "vendor/uPlot.iife.min.js")
SCRIPTS = (*LIBRARIES, "views.js", "evaluation.js", "report.js")
STYLES = ("vendor/uPlot.min.css", "style.css")
MARKDOWN = "report.md"


def write_report(folder: Path, *, markdown: bool = False) -> Path:
    """Write the report into the folder and give its path.

    Raises ConfigError if there is no run or evaluation, or it cannot be written.
    """
    data = describe(folder)
    path = folder / (MARKDOWN if markdown else PAGE)
    text = as_markdown(data) if markdown else as_html(data)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


def web_file(name: str) -> str:
    return (resources.files("esper.observatory") / "web" / name).read_text(encoding="utf-8")


def as_html(data: Mapping[str, Any]) -> str:
    """A page that contains its scripts, style and data; its policy forbids any network access."""
    script = "\n".join(map(web_file, SCRIPTS))
    style = "\n".join(map(web_file, STYLES))
    content = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_sha(script)}'; style-src '{_sha(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = html.escape(data["run"]["name"])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title} - Esper</title>
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript><pre>{html.escape(as_markdown(data))}</pre></noscript>
<script type="application/json" id="data">{content}</script>
<script>{script}</script>
</body>
</html>
"""


def _sha(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- Markdown ------------------------------------------------------------------------------------


def as_markdown(data: Mapping[str, Any]) -> str:
    run = data["run"]
    parts = [f"# {_md(run['name'])}", f"{run['kind'].capitalize()}, {run['state']}."]
    parts += [f"> {_md(text)}" for text in dict.fromkeys([run["why"], *data["faults"]]) if text]
    if run["kind"] == "evaluation":
        parts += _evaluation_parts(data)
    else:
        parts += _run_parts(data)
    if data.get("reproduce"):
        parts += ["## Command to repeat it", f"    {data['reproduce']}"]
    return "\n\n".join(parts) + "\n"


def _run_parts(data: Mapping[str, Any]) -> list[str]:
    run, episode = data["run"], data["episode"]
    about = [(name, run[name]) for name in ("task", "controller", "key")]
    about += [("validation score", format_number(run["val_score"], ".1f"))]
    about += [("parameters", format_number(run["params"], ",.0f"))]
    parts = [_table(("", ""), [(name, value) for name, value in about if value is not None])]
    arms = [
        [
            arm.get("arm"),
            *format_columns(arm, {"test_score": ".1f", "params": ",.0f", "macs": ",.0f"}),
        ]
        for arm in data["arms"]
    ]
    parts += _section("Comparison", ("on test data", "score", "parameters", "multiply-adds"), arms)
    forms = {"params": ",.0f", "contribution": "+.2f", "shapley": "+.2f"}
    seeds = [
        [f"{seed.get('blueprint')} in {seed.get('module')}", *format_columns(seed, forms)]
        for seed in data["seeds"]
    ]
    parts += _section("Kept seeds", ("seed", "parameters", "contribution", "Shapley value"), seeds)
    if episode["frames"]:
        parts += ["## Stages of every slot", _lanes(data)]
    decisions = [
        (
            row["step"],
            choices_text(row["action"]),
            format_number(row["value"], "+.2f"),
            choices_text(row["second"]) or "-",
        )
        for row in episode["decisions"]
    ]
    head = ("before epoch", "action with probabilities", "value", "second choice")
    parts += _section("Decisions of the policy", head, decisions)
    costs = [(what, format_number(macs, ",.0f")) for what, macs in data["cost"]]
    parts += _section("Cost", ("what", "multiply-adds"), costs)
    return parts + _section("Settings", ("setting", "value"), data["settings"])


def _lanes(data: Mapping[str, Any]) -> str:
    """A letter per epoch and slot, as an indented block."""
    episode, stages = data["episode"], data["stages"]
    letters = stages["letters"]
    names = [name[:24] for name in episode["modules"]]
    width = max(map(len, names), default=0)
    lines = [
        name.ljust(width)
        + "  "
        + "".join(letters.get(frame["slots"][i][0], "?") for frame in episode["frames"][-100:])
        for i, name in enumerate(names)
    ]
    legend = {letters[stage]: name for stage, name in stages["names"].items()}
    keys = ", ".join(f"{letter} {name}" for letter, name in legend.items())
    return "\n".join(f"    {text}" for text in lines) + f"\n\nOne letter per epoch: {keys}."


def _evaluation_parts(data: Mapping[str, Any]) -> list[str]:
    report = data.get("evaluation")
    if report is None:
        return []
    forms = {"test_score": ".2f", "params": ",.0f", "macs": ",.0f"}
    arms = [[arm["arm"], *format_columns(arm, forms)] for arm in report["arms"]]
    pairs = [
        (
            f"{row['arm']} - {row['versus']}",
            f"{row['mean']:+.2f}",
            "-" if row["low"] is None else f"{row['low']:+.2f} … {row['high']:+.2f}",
            format_number(number(row, "p_holm"), ".3f"),
        )
        for row in report["comparisons"]
    ]
    keys = len(report["keys"])
    return [
        f"{report.get('steps')} epochs on {keys} paired keys of {_md(report.get('task'))}.",
        *([_md(report["crossover"])] if report.get("crossover") else []),
        _table(("arm", "test score", "parameters", "multiply-adds"), arms),
        _table(("difference", "mean", "95 % interval", "p (Holm)"), pairs),
        *([_md(data["few_keys"])] if data.get("few_keys") else []),
    ]


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [f"## {title}", _table(head, rows)] if rows else []


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *([_md(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _md(text: object) -> str:
    """Text with the special characters of Markdown escaped."""
    return re.sub(r"([\\`*_{}\[\]<>!|~&$])", r"\\\1", str(text))
