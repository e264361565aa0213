"""Docstrings as Markdown: an extension of Griffe, which reads them for the reference.

A docstring explains fields in two columns, the name and what it is. On a page that is a list.
"""

import re
from typing import Any

from griffe import Extension, Object

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


class Columns(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
