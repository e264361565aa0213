"""`esper advise`."""

import json
from pathlib import Path

import pytest

from command_support import esper_here


def test_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("advise", "--task", "digits", "--steps", "3", "--extra", "1.0")
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
    shown = capsys.readouterr().out
    assert "starved" in shown
    assert "widen_double in blocks.0" in shown
    assert shown.rstrip().split("\n")[-1].startswith("Retrain wider: ")
    assert not list(tmp_path.iterdir())


def test_json_is_all_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("advise", "--steps", "3", "--extra", "0.5", "--json")
    found = []
    for _ in "12":
        assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["verdict"] in ("grow", "continue")
    assert found[0]["host_params"] == 496
    assert {"rho", "starved", "plateaued", "candidates"} <= set(found[0]["findings"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "nothing"), "nothing"),
        (("--extra", "0.01"), "esper: extra=0.01 of 31 epochs is no budget for one more"),
        (("--extra", "nan"), "extra=nan"),
        (("--extra", "much"), "extra"),
        (("--key", "-1"), "key"),
    ],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert esper_here(monkeypatch, "advise", *words, cwd=tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
