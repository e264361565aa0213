"""Esper on the simulated accelerator of `pretend_device`, in processes of their own: with the
accelerator in it, a process is another machine for every other test."""

import ast
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest

from pretend_device.pretend_device import SOURCE, environment
from pretend_device.run import CASES, command

# What also has to work on a device without float64.
NARROW = (
    "test_growth_is_that_of_the_cpu_and_can_be_exported",
    "test_a_trained_model_is_cooled_and_grows",
    "test_attach_works_in_a_loop_with_any_precision",
    "test_a_policy_is_trained_on_a_device",
)


def names() -> list[str]:
    tree = ast.parse(CASES.read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    if not (shutil.which("c++") or shutil.which("g++")) or not shutil.which("ninja"):
        pytest.skip("the simulated device needs a C++ compiler and ninja")
    # `make test` has done it before; the result is in torch's cache of extensions.
    subprocess.run([sys.executable, SOURCE], check=True, timeout=600)


@cache
def results(*, float64: bool) -> dict[str, list[tuple[str, str]]]:
    """By test the name of each of its runs, and why it failed."""
    more = {} if float64 else {"PRETEND_NO_FLOAT64": "1"}
    # The GradScaler of torch needs float64, except on MPS.
    chosen = () if float64 else ("-k", f"({' or '.join(NARROW)}) and not fp16")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            command("-q", f"--junitxml={report}", *chosen),
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert report.exists(), done.stdout + done.stderr
        cases = ElementTree.parse(report).iter("testcase")
    found: dict[str, list[tuple[str, str]]] = {}
    for case in cases:
        name = case.get("name", "")
        broken = (*case.iter("failure"), *case.iter("error"))
        failed = [f"{each.get('message')}\n{each.text}" for each in broken]
        found.setdefault(name.partition("[")[0], []).append((name, "\n".join(failed)))
    return found


def check(name: str, *, float64: bool) -> None:
    found = results(float64=float64)
    assert found.get(name), f"{name} was not run"
    for case, failure in found[name]:
        assert not failure, f"{case}: {failure}"


@pytest.mark.parametrize("name", names())
def test_on_the_simulated_device(name: str):
    check(name, float64=True)


@pytest.mark.parametrize("name", NARROW)
def test_on_a_device_without_float64(name: str):
    check(name, float64=False)
