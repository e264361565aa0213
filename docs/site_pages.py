"""Makes pages of the documentation site from other files: a hook of MkDocs (`make docs`).

Documents link to files of the repository, so that they can be read there. On the site, examples,
notebooks and documents outside `docs/` are pages, and links to them become links to these pages.
Notebooks are rendered here, because a plugin would load styles and scripts from elsewhere.
"""

import json
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OUTSIDE = {"CONTRIBUTING.md": "project/contributing.md", "CHANGELOG.md": "project/changelog.md"}
LINK = re.compile(r"(\]\()([^)\s#]*)([^)\s]*\))")
FENCED = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
# Weights in the search: messages come first, reasons last.
WEIGHTS = {"troubleshooting": 20.0, "decisions": 0.1, "project": 0.1, "review-findings": 0.1}
OUTPUT = "{ .text .output }"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def page_of(path: str) -> str | None:
    """The page, as a path below `docs/`, that shows this file of the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if re.fullmatch(r"examples/\w+\.py", path):
        return path.removesuffix(".py") + ".md"
    if path == "docs/decisions":
        return "decisions/index.md"
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        return inside.removesuffix(".ipynb") + ".md" if inside.endswith(".ipynb") else inside
    return None


def source_of(page: str) -> str:
    """The file of the repository that this page shows."""
    for source, made in OUTSIDE.items():
        if page == made:
            return source
    return page if page.startswith("examples/") else f"docs/{page}"


def relinked(text: str, page: str) -> str:
    """The text with links to files of the repository replaced by links to their pages."""
    here, folder = posixpath.dirname(page), posixpath.dirname(source_of(page))

    def replaced(link: re.Match[str]) -> str:
        begin, target, rest = link.groups()
        if not target or ":" in target:
            return link[0]
        found = page_of(posixpath.normpath(posixpath.join(folder, target)))
        return link[0] if found is None else begin + posixpath.relpath(found, here or ".") + rest

    parts = FENCED.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


def fence(language: str, text: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"


def example_page(path: Path) -> str:
    """An example, below the text of its docstring."""
    _, text, code = path.read_text().split('"""', 2)
    title, _, rest = text.partition("\n")
    return f"# {title}\n{rest}\n`{path.relative_to(ROOT)}`\n\n{fence('python', code.strip())}"


def output_text(output: Mapping[str, Any]) -> str:
    """An output of a notebook cell, as Markdown."""
    if output["output_type"] == "stream":
        return fence(OUTPUT, ANSI.sub("", "".join(output["text"])))
    data = output.get("data", {})
    if "image/png" in data:
        coded = "".join(data["image/png"]).replace("\n", "")
        return (
            f'<img class="output" alt="Output of this cell" src="data:image/png;base64,{coded}">\n'
        )
    return fence(OUTPUT, "".join(data["text/plain"]))


def notebook_page(path: Path) -> str:
    """A notebook with its outputs; it can be downloaded."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        else:
            parts += [fence("python", text), *map(output_text, cell["outputs"])]
    title, *rest = parts
    link = f'<a href="{path.name}" download>Download this notebook</a>\n'
    return "\n\n".join([title, link, *rest])


def title_of(path: Path) -> str:
    """The first heading, without a number."""
    return re.sub(r"^# (\d+[.:] )?", "", path.read_text().split("\n", 1)[0])


def decisions_page() -> str:
    lines = [f"- [{path.stem[:3]}]({path.name}) {title_of(path)}" for path in decisions()]
    return "\n".join(
        ["# Decisions", "", "Each record: what was decided, why, and the measurements.", "", *lines]
    )


def decisions() -> list[Path]:
    return sorted((DOCS / "decisions").glob("[0-9]*.md"))


def pages() -> dict[str, str]:
    """The text of every page that is made from another file."""
    made = {page: (ROOT / source).read_text() for source, page in OUTSIDE.items()}
    made |= {
        f"examples/{path.stem}.md": example_page(path)
        for path in sorted((ROOT / "examples").glob("*.py"))
    }
    made |= {
        f"notebooks/{path.stem}.md": notebook_page(path)
        for path in sorted((DOCS / "notebooks").glob("*.ipynb"))
    }
    return made | {"decisions/index.md": decisions_page()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, text in pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    part = re.split(r"[/.]", page.file.src_uri)[0]
    page.meta["search"] = {"boost": WEIGHTS.get(part, 1.0)}
    return relinked(markdown, page.file.src_uri)
