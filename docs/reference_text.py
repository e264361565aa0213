"""Docstrings as Markdown: an extension of Griffe, for the reference.

Docstrings describe fields in two columns, name and text. On a page these become a list.
"""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

ENTRY = re.compile(r"(?P<name>[\w*][^ ]*(?:,? [^ ]+)*?)  +(?P<text>\S.*)")


def listed(paragraph: str) -> str:
    """Two columns as a list; any other paragraph as it is."""
    lines = paragraph.split("\n")
    if not ENTRY.fullmatch(lines[0]) or not all(
        line.startswith(" ") or ENTRY.fullmatch(line) for line in lines
    ):
        return paragraph
    items: list[str] = []
    for line in lines:
        entry = None if line.startswith(" ") else ENTRY.fullmatch(line)
        if entry:
            items.append(f"- `{entry['name']}`: {entry['text']}")
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(items)


def markdown(docstring: str) -> str:
    return "\n\n".join(map(listed, docstring.split("\n\n")))


def comment_above(lines: list[str], number: int) -> str:
    """The comment that ends on the line before `number`, which counts from 1."""
    found: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not line.strip().startswith("# "):
            break
        found.insert(0, line.strip().removeprefix("# "))
    return " ".join(found)


class Columns(Extension):
    """Turns columns into lists, and uses comments above fields as their docstrings."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_attribute(self, *, attr: Attribute, **kwargs: Any) -> None:
        field = attr.parent is not None and attr.parent.is_class
        if field and attr.docstring is None and attr.lineno is not None:
            text = comment_above(attr.lines_collection[attr.filepath], attr.lineno)
            if text and not attr.is_private:
                attr.docstring = Docstring(text, parent=attr)
