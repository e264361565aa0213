"""Shells can complete the command."""

import pytest
from typer.testing import CliRunner

from esper.cli import app


@pytest.mark.parametrize(
    ("words", "found", "others"),
    [("esper gr", {"grow"}, {"evaluate"}), ("esper evaluate --sc", {"--scenario"}, {"--steps"})],
)
def test_words_are_completed(words: str, found: set[str], others: set[str]) -> None:
    number = str(len(words.split()) - 1)
    asked = {"_ESPER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
    shown = CliRunner().invoke(app, [], prog_name="esper", env=asked).stdout.split()
    assert found <= set(shown)
    assert not others & set(shown)
