"""`esper doctor`: checks what is installed and whether it works."""

import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Literal

import typer

from esper.cli.printing import Output

PACKAGE = "esper-grow"
# Extras that only combine others, or are for developers of Esper.
GATHERED = ("demo", "dev")
STEPS = 16  # enough for a seed to be planted, blended in and kept


@dataclass(frozen=True)
class Finding:
    """The result of a check; `optional`: missing, but not needed. `fix` says what to do."""

    about: str
    state: Literal["fine", "optional", "wrong"]
    detail: str
    fix: str | None = None


@dataclass(frozen=True)
class Requirement:
    """A required package with its versions; `extra` is None if it is always required."""

    name: str
    bounds: str
    extra: str | None

    @staticmethod
    def of(text: str) -> "Requirement":
        name, bounds, extra = re.fullmatch(
            r"([\w.-]+)\s*([^;]*?)\s*(?:;.*extra == ['\"]([\w-]+)['\"])?", text
        ).groups()  # type: ignore[union-attr]  # written by pyproject.toml
        return Requirement(name, bounds, extra)

    def problem(self) -> str | None:
        """None if the installed version fits."""
        try:
            found = version(self.name)
        except PackageNotFoundError:
            return f"{self.name} is not installed"
        if not within(found, self.bounds):
            return f"{self.name} is {found}, not {self.bounds}"
        return None


def within(found: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=2.7,<3`."""
    return all(
        _numbers(found) >= _numbers(bound[2:])
        if bound.startswith(">=")
        else _numbers(found) < _numbers(bound[1:])
        for bound in bounds.replace(" ", "").split(",")
        if bound
    )


def _numbers(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` is (2, 13): zeros at the end are left out."""
    leading = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in leading.group().split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def check_packages(needed: Sequence[Requirement]) -> Iterator[Finding]:
    """The packages that Esper needs."""
    for item in needed:
        if item.extra is None:
            problem = item.problem()
            if problem is None:
                yield Finding(item.name, "fine", version(item.name))
            else:
                fix = f"pip install '{item.name}{item.bounds}'"
                yield Finding(item.name, "wrong", problem, fix)


def check_extras(needed: Sequence[Requirement]) -> Iterator[Finding]:
    """A missing extra is optional; one that is too old is wrong."""
    extras = sorted({item.extra for item in needed if item.extra} - set(GATHERED))
    for extra in extras:
        own = [item for item in needed if item.extra == extra]
        problems = [problem for item in own if (problem := item.problem()) is not None]
        about, fix = f"extra {extra}", f"pip install '{PACKAGE}[{extra}]'"
        if not problems:
            there = ", ".join(f"{item.name} {version(item.name)}" for item in own)
            yield Finding(about, "fine", there)
        else:
            old = any(not problem.endswith("is not installed") for problem in problems)
            yield Finding(about, "wrong" if old else "optional", "; ".join(problems), fix)


def check_data(root: Path) -> Iterator[Finding]:
    from esper.tolaria.data.catalogue import CATALOGUE, State, status

    for name in CATALOGUE:
        found, about = status(name, root), f"data {name}"
        if found.state in (State.EMBEDDED, State.PRESENT):
            yield Finding(about, "fine", found.detail)
        elif found.state is State.MISSING:
            yield Finding(about, "optional", "missing", found.detail)
        else:
            yield Finding(about, "wrong", "damaged", found.detail)


def check_growth() -> Finding:
    """Grow a tiny network on random points, and compare it with its export."""
    began = time.perf_counter()
    try:
        kept, params, off = _grow_a_little()
    except Exception as error:  # noqa: BLE001  # any error is a finding
        kind = type(error).__name__
        return Finding("growth", "wrong", f"{kind}: {error}".split("\n")[0], _REINSTALL)
    seconds = time.perf_counter() - began
    if not off <= 1e-5:
        return Finding("growth", "wrong", f"the exported network is off by {off:.2g}", _REINSTALL)
    detail = f"kept {kept} seed, exported {params} parameters, in {seconds:.1f} s"
    return Finding("growth", "fine", detail)


_REINSTALL = "reinstall torch with constraints.txt; if the problem stays, report it with this list"


def _grow_a_little() -> tuple[int, int, float]:
    """Kept seeds, parameters at the end, and the largest difference of the export's output."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import esper
    from esper.api import one_thread

    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(256, 2)
        quadrants = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        data = TensorDataset(x, quadrants)
        # Four classes through one number: a seed that bypasses it always helps.
        model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1), nn.Linear(1, 4))
        grown = esper.grow(
            model,
            DataLoader(data, 64),
            DataLoader(data, 256),
            slots=["0"],
            steps=STEPS,
            controller="scripted:early",
            settings=esper.GrowthSettings(progress=False),
        )
        plain = grown.export().eval()
        with torch.no_grad():
            off = float((plain(x) - model.eval()(x)).abs().max())
    return grown.outcome.fossilized, sum(p.numel() for p in plain.parameters()), off


def examine() -> Iterator[Finding]:
    """All findings, as they are made; growth is last, and only if the packages are fine."""
    needed = [Requirement.of(text) for text in metadata(PACKAGE).get_all("Requires-Dist") or []]
    yield Finding("python", "fine", platform.python_version())
    yield Finding("esper", "fine", version(PACKAGE))
    packages = list(check_packages(needed))
    yield from packages
    yield from check_extras(needed)
    if any(finding.state == "wrong" for finding in packages):
        return
    from esper.tolaria.data.catalogue import data_root

    yield from check_data(data_root())
    yield check_growth()


def doctor(output: Output) -> None:
    """Check that everything Esper needs is installed and works.

    Checks versions, extras and data sets, and grows a tiny network. Each line with a problem says
    what to do. With --quiet only problems are printed. The exit code is 1 if something is wrong; a
    missing extra or data set is not an error.

    Example: esper doctor --json
    """
    findings: list[Finding] = []
    for finding in examine():
        findings.append(finding)
        if finding.state == "wrong" or not output.quiet:
            fix = "" if finding.fix is None else f"; {finding.fix}"
            line = f"{finding.about:<20} {finding.state:<8} {finding.detail}{fix}"
            output.say(line, whole=True)
    wrong = [finding.about for finding in findings if finding.state == "wrong"]
    output.json({"wrong": wrong, "findings": [asdict(each) for each in findings]})
    if not output.quiet:
        output.say(f"\nWrong: {', '.join(wrong)}." if wrong else "\nNo problems found.")
    if wrong:
        raise typer.Exit(1)
