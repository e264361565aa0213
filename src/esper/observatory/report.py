"""One run or evaluation on one page: a self-contained HTML file."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError
from esper.observatory.describe import describe
from esper.observatory.run_directory import PAGE

LIBRARIES = ("vendor/htm-preact.umd.js", "vendor/uPlot.iife.min.js")
SCRIPTS = (*LIBRARIES, "views.js", "evaluation.js", "report.js")
STYLES = ("vendor/uPlot.min.css", "style.css")


def write_report(folder: Path) -> Path:
    """Write the report into the folder and give its path.

    Raises ConfigError if there is no run or evaluation, or it cannot be written.
    """
    path, text = folder / PAGE, as_html(describe(folder))
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
<noscript>This page needs JavaScript; esper show prints the summary of the run.</noscript>
<script type="application/json" id="data">{content}</script>
<script>{script}</script>
</body>
</html>
"""


def _sha(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
