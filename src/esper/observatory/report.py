"""One run or evaluation on one page: HTML that needs nothing else, or Markdown."""

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
from esper.observatory.decisions import in_words
from esper.observatory.described import describe
from esper.observatory.reading import number
from esper.observatory.run_directory import PAGE
from esper.observatory.terminal import shown

LIBRARIES = ("vendor/htm-preact.umd.js", "vendor/uPlot.iife.min.js")
SCRIPTS = (*LIBRARIES, "views.js", "evaluation.js", "report.js")
STYLES = ("vendor/uPlot.min.css", "style.css")
MARKDOWN = "report.md"


def write_report(folder: Path, *, markdown: bool = False) -> Path:
    """Write the report into the folder and give its path.

    Raises ConfigError if there is no run or evaluation, or it cannot be written.
    """
    told = describe(folder)
    path = folder / (MARKDOWN if markdown else PAGE)
    text = as_markdown(told) if markdown else as_html(told)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


def web_file(name: str) -> str:
    return (resources.files("esper.observatory") / "web" / name).read_text(encoding="utf-8")


def as_html(told: Mapping[str, Any]) -> str:
    """The page, with scripts, style and data inside; it may load nothing and send nothing."""
    script = "\n".join(map(web_file, SCRIPTS))
    style = "\n".join(map(web_file, STYLES))
    data = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_sha(script)}'; style-src '{_sha(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = html.escape(told["line"]["name"])
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
<noscript><pre>{html.escape(as_markdown(told))}</pre></noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _sha(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- Markdown ------------------------------------------------------------------------------------


def as_markdown(told: Mapping[str, Any]) -> str:
    line = told["line"]
    parts = [f"# {_md(line['name'])}", f"{line['kind'].capitalize()}, {line['state']}."]
    parts += [f"> {_md(text)}" for text in dict.fromkeys([line["why"], *told["faults"]]) if text]
    if line["kind"] == "evaluation":
        parts += _evaluation_parts(told.get("evaluation"))
    else:
        parts += _run_parts(told)
    if told.get("reproduce"):
        parts += ["## Do it again", f"    {told['reproduce']}"]
    return "\n\n".join(parts) + "\n"


def _run_parts(told: Mapping[str, Any]) -> list[str]:
    line, episode = told["line"], told["episode"]
    about = [("task", line["task"]), ("controller", line["controller"]), ("key", line["key"])]
    about += [("validation score", shown(line["val_score"], ".1f"))]
    about += [("parameters", shown(line["params"], ",.0f"))]
    parts = [_table(("", ""), [(name, value) for name, value in about if value is not None])]
    if told["arms"]:
        rows = [
            (
                arm.get("arm"),
                shown(number(arm, "test_score"), ".1f"),
                shown(number(arm, "params"), ",.0f"),
                shown(number(arm, "macs"), ",.0f"),
            )
            for arm in told["arms"]
        ]
        parts += ["## What the growth was worth"]
        parts += [_table(("on test data", "score", "parameters", "multiply-adds"), rows)]
    if told["seeds"]:
        rows = [
            (
                f"{seed.get('blueprint')} in {seed.get('module')}",
                shown(number(seed, "params"), ",.0f"),
                shown(number(seed, "contribution"), "+.2f"),
                shown(number(seed, "shapley"), "+.2f"),
            )
            for seed in told["seeds"]
        ]
        parts += ["## Seeds that were kept"]
        parts += [_table(("seed", "parameters", "lost without it", "Shapley value"), rows)]
    if episode["frames"]:
        parts += ["## The life of every slot", _lanes(told)]
    if episode["decisions"]:
        rows = [
            (
                line["step"],
                in_words(line["did"]),
                shown(line["value"], "+.2f"),
                in_words(line["instead"]) or "-",
            )
            for line in episode["decisions"]
        ]
        parts += ["## What the policy thought"]
        head = ("before epoch", "what it did, and how probable", "expected", "second choice")
        parts += [_table(head, rows)]
    if told["bill"]:
        parts += ["## The bill"]
        bill = [(what, shown(macs, ",.0f")) for what, macs in told["bill"]]
        parts += [_table(("what", "multiply-adds"), bill)]
    if told["settings"]:
        parts += ["## Settings", _table(("setting", "value"), told["settings"])]
    return parts


def _lanes(told: Mapping[str, Any]) -> str:
    """A letter per epoch and slot, as an indented block."""
    letters, episode = told["looks"]["letters"], told["episode"]
    names = [name[:24] for name in episode["modules"]]
    width = max(map(len, names), default=0)
    lines = [
        name.ljust(width)
        + "  "
        + "".join(letters.get(frame["slots"][i][0], "?") for frame in episode["frames"][-100:])
        for i, name in enumerate(names)
    ]
    keys = ", ".join(f"{letter} {stage.lower()}" for stage, letter in letters.items())
    return "\n".join(f"    {text}" for text in lines) + f"\n\nOne letter per epoch: {keys}."


def _evaluation_parts(report: Mapping[str, Any] | None) -> list[str]:
    if report is None:
        return []
    arms = [
        (arm["arm"], f"{arm['test_score']:.2f}", f"{arm['params']:,.0f}", f"{arm['macs']:,.0f}")
        for arm in report["arms"]
    ]
    pairs = [
        (
            f"{row['arm']} - {row['versus']}",
            f"{row['mean']:+.2f}",
            "-" if row["low"] is None else f"{row['low']:+.2f} … {row['high']:+.2f}",
            shown(number(row, "p_holm"), ".3f"),
        )
        for row in report["comparisons"]
    ]
    keys = len(report["keys"])
    return [
        f"{report.get('steps')} epochs on {keys} paired keys of {_md(report.get('task'))}.",
        *([_md(report["crossover"])] if report.get("crossover") else []),
        _table(("arm", "test score", "parameters", "multiply-adds"), arms),
        _table(("difference", "mean", "95 % interval", "p (Holm)"), pairs),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *([_md(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _md(text: object) -> str:
    """Text that Markdown does not obey."""
    return re.sub(r"([\\`*_{}\[\]<>!|~&$])", r"\\\1", str(text))
