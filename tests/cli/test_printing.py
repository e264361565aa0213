"""`--quiet` and `--json`: the result and nothing else, and the same record as without them."""

import json
import tomllib
from pathlib import Path

import pytest

from command_support import esper_here

GROW = ("grow", "--steps", "2", "--no-compare", "--controller", "static")
EVALUATE = ("evaluate", "--arms", "static", "--keys", "1", "--steps", "1", "--no-controls")


@pytest.mark.parametrize(
    ("words", "folder", "shown"),
    [
        (GROW, "digits-static-0", "test accuracy"),
        (EVALUATE, "evaluate-digits", "1 paired keys, 1 epochs."),
    ],
)
def test_quiet_prints_the_result_and_no_paths(
    words: tuple[str, ...],
    folder: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert esper_here(monkeypatch, *words, "--quiet", cwd=tmp_path) == 0
    printed = capsys.readouterr()
    assert shown in printed.out
    assert folder not in printed.out
    assert "validation " not in printed.out
    assert printed.err == ""
    assert (tmp_path / "runs" / folder / "report.html").exists()


def test_grow_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert esper_here(monkeypatch, *GROW, "--json", cwd=tmp_path) == 0
    printed = capsys.readouterr()
    found, run = json.loads(printed.out), tmp_path / "runs" / "digits-static-0"
    assert found["out"] == str(run.relative_to(tmp_path))
    assert found["arms"] == json.loads((run / "summary.json").read_text())
    assert "model.pt2" in printed.err
    config = tomllib.loads((run / "config.toml").read_text())
    assert "steps" in config
    assert not {"quiet", "json"} & set(config)


def test_evaluate_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert esper_here(monkeypatch, *EVALUATE, "--json", "--quiet", cwd=tmp_path) == 0
    printed = capsys.readouterr()
    written = tmp_path / "runs" / "evaluate-digits" / "evaluation.json"
    assert json.loads(printed.out) == json.loads(written.read_text())
    assert printed.err == ""
