"""The messages that the troubleshooting page quotes exist in the source."""

import ast
import re

import pytest

from document_support import DOCS, ROOT

QUOTED = re.findall(
    r"^\*\*`(.+)`\*\*$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE
)


def texts() -> list[str]:
    """Every string of the source, with … for inserted values."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


TEXTS = texts()


def test_the_page_quotes_messages() -> None:
    assert len(QUOTED) > 40
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_exists(message: str) -> None:
    assert any(message in text for text in TEXTS)


def test_each_message_has_a_cause_and_a_cure() -> None:
    blocks = (DOCS / "troubleshooting.md").read_text().split("\n\n")
    for here, after in zip(blocks, [*blocks[1:], ""], strict=True):
        if here.startswith("**`"):
            assert len(after) > 30, here
            assert not after.startswith(("**", "#")), here
