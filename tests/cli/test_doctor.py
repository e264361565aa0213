"""`esper doctor`: what it finds, in health and in sickness."""

import json
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement as Reference
from packaging.specifiers import SpecifierSet

from command_support import esper_here
from esper.cli import doctor_command as health
from esper.cli.doctor_command import (
    Requirement,
    check_extras,
    check_packages,
    within,
)

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
DECLARED = [
    *PROJECT["dependencies"],
    *(
        f"{text}; extra == '{extra}'"
        for extra, texts in PROJECT["optional-dependencies"].items()
        for text in texts
        if not text.startswith(PROJECT["name"])
    ),
]


@pytest.mark.parametrize("text", DECLARED)
def test_requirements_are_read_as_pip_reads_them(text: str) -> None:
    ours, theirs = Requirement.of(text), Reference(text)
    assert (ours.name, ours.extra is None) == (theirs.name, theirs.marker is None)
    assert SpecifierSet(ours.bounds) == theirs.specifier
    for found in ("0.1", "1.26", "2.7", "2.7.0", "2.13.0", "3", "3.0", "13", "2024.1"):
        assert within(found, ours.bounds) == theirs.specifier.contains(found)


def test_all_is_well_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert esper_here(monkeypatch, "doctor", "--json", cwd=tmp_path) == 0, capsys.readouterr().out
    found = json.loads(capsys.readouterr().out)
    by_name = {each["about"]: each for each in found["findings"]}
    assert found["wrong"] == []
    assert by_name["torch"]["detail"] == version("torch")
    assert by_name["data digits"]["state"] == "fine"
    assert by_name["data cifar10"]["state"] == "optional"
    assert "esper data get cifar10" in by_name["data cifar10"]["fix"]
    assert "kept 1 seed" in by_name["growth"]["detail"]
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_is_named_with_its_cure_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> tuple[int, int, float]:
        raise RuntimeError("no kernel\nand a page of advice")

    monkeypatch.setattr(health, "_grow_a_little", broken)
    assert esper_here(monkeypatch, "doctor", cwd=tmp_path) == 1
    lines = capsys.readouterr().out.strip().split("\n")
    assert lines[-1] == "Wrong: growth."
    wrong = {line.split()[0]: line for line in lines if " wrong " in line}
    assert "RuntimeError: no kernel; reinstall torch" in wrong["growth"]


@pytest.mark.parametrize(("off", "state"), [(0.0, "fine"), (0.1, "wrong"), (float("nan"), "wrong")])
def test_an_export_that_answers_otherwise_is_wrong(
    off: float, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_grow_a_little", lambda: (1, 100, off))
    assert health.check_growth().state == state


def test_a_package_that_is_missing_or_old() -> None:
    needed = [
        Requirement.of(text)
        for text in (
            "numpy>=1.26",
            "rich>=1000",
            "no-such-thing>=2; extra == 'absent'",
            "rich>=1000; extra == 'old'",
            "numpy>=1.26; extra == 'there'",
            "no-such-thing; extra == 'dev'",
        )
    ]
    numpy, rich = check_packages(needed)
    assert (numpy.state, rich.state, rich.fix) == ("fine", "wrong", "pip install 'rich>=1000'")
    absent, old, there = check_extras(needed)
    assert (absent.state, absent.fix) == ("optional", "pip install 'esper-grow[absent]'")
    assert (old.state, there.state) == ("wrong", "fine")
