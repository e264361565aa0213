"""`esper doctor`: what is installed, whether it works, and the cure where it does not."""

import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Literal

import typer

from esper.cli.options import option
from esper.cli.printing import AS_JSON, consoles, print_json

PACKAGE = "esper-grow"
# Extras that only gather others, or are for people who work on Esper.
GATHERED = ("demo", "dev")
STEPS = 16  # enough for a seed to be planted, blended in and kept


@dataclass(frozen=True)
class Finding:
    """`optional` is what can be missing without harm; `cure` is what to do, where something is."""

    about: str
    state: Literal["fine", "optional", "wrong"]
    detail: str
    cure: str | None = None


@dataclass(frozen=True)
class Requirement:
    """A package that we need at a version, as in our metadata; `extra` is None for all users."""

    name: str
    bounds: str
    extra: str | None

    @staticmethod
    def of(text: str) -> "Requirement":
        name, bounds, extra = re.fullmatch(
            r"([\w.-]+)\s*([^;]*?)\s*(?:;.*extra == ['\"]([\w-]+)['\"])?", text
        ).groups()  # type: ignore[union-attr]  # ours to write, in pyproject.toml
        return Requirement(name, bounds, extra)

    def problem(self) -> str | None:
        """None if what is installed will do."""
        try:
            found = version(self.name)
        except PackageNotFoundError:
            return f"{self.name} is not installed"
        if not within(found, self.bounds):
            return f"{self.name} is {found}, not {self.bounds}"
        return None


def within(found: str, bounds: str) -> bool:
    """Whether a version keeps to bounds such as `>=2.7,<3`."""
    return all(
        _numbers(found) >= _numbers(bound[2:])
        if bound.startswith(">=")
        else _numbers(found) < _numbers(bound[1:])
        for bound in bounds.replace(" ", "").split(",")
        if bound
    )


def _numbers(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` is (2, 13): zeros at the end say nothing."""
    leading = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in leading.group().split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def requirements() -> list[Requirement]:
    return [Requirement.of(text) for text in metadata(PACKAGE).get_all("Requires-Dist") or []]


def check_python(found: str, bounds: str) -> Finding:
    if within(found, bounds):
        return Finding("python", "fine", found)
    return Finding("python", "wrong", f"{found}, not {bounds}", f"install Python {bounds}")


def check_packages(needed: Sequence[Requirement]) -> Iterator[Finding]:
    """Those without which Esper does not run."""
    for item in needed:
        if item.extra is None:
            problem = item.problem()
            if problem is None:
                yield Finding(item.name, "fine", version(item.name))
            else:
                cure = f"pip install '{item.name}{item.bounds}'"
                yield Finding(item.name, "wrong", problem, cure)


def check_extras(needed: Sequence[Requirement]) -> Iterator[Finding]:
    """An extra that is not there is optional; one that is too old is wrong."""
    extras = sorted({item.extra for item in needed if item.extra} - set(GATHERED))
    for extra in extras:
        own = [item for item in needed if item.extra == extra]
        problems = [problem for item in own if (problem := item.problem()) is not None]
        about, cure = f"extra {extra}", f"pip install '{PACKAGE}[{extra}]'"
        if not problems:
            there = ", ".join(f"{item.name} {version(item.name)}" for item in own)
            yield Finding(about, "fine", there)
        else:
            old = any(not problem.endswith("is not installed") for problem in problems)
            yield Finding(about, "wrong" if old else "optional", "; ".join(problems), cure)


def check_threads(cores: int, asked: str | None) -> Finding:
    """`asked` is OMP_NUM_THREADS. Esper trains with one thread per process anyway; a loop of the
    user's own does not."""
    if asked is None:
        return Finding("threads", "fine", f"{cores} cores")
    if not asked.isdecimal() or not 1 <= int(asked) <= cores:
        return Finding(
            "threads",
            "wrong",
            f"OMP_NUM_THREADS is {asked!r} with {cores} cores",
            f"unset OMP_NUM_THREADS, or set it to a number from 1 to {cores}",
        )
    return Finding("threads", "fine", f"{asked} of {cores} cores (OMP_NUM_THREADS)")


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


def check_folder(about: str, folder: Path, cure: str) -> Finding:
    """Whether files can be written to a folder, or to the one that it would be made in."""
    place = folder.absolute()
    while not place.exists() and not place.is_symlink():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"?")
    except OSError as error:
        return Finding(about, "wrong", f"{folder}: {error.strerror} ({place})", cure)
    return Finding(about, "fine", f"{folder} can be written")


def check_growth() -> Finding:
    """Grow a tiny network on made-up points, and see that its export answers as it does."""
    began = time.perf_counter()
    try:
        kept, params, off = _grow_a_little()
    except Exception as error:  # noqa: BLE001  # whatever it is, the patient is to hear of it
        kind = type(error).__name__
        return Finding("growth", "wrong", f"{kind}: {error}".split("\n")[0], _REINSTALL)
    seconds = time.perf_counter() - began
    if not off <= 1e-5:
        return Finding("growth", "wrong", f"the exported network is off by {off:.2g}", _REINSTALL)
    detail = f"kept {kept} seed, exported {params} parameters, in {seconds:.1f} s"
    return Finding("growth", "fine", detail)


_REINSTALL = "install torch anew, with constraints.txt; if it stays, report it with this list"


def _grow_a_little() -> tuple[int, int, float]:
    """Seeds that were kept, parameters at the end, and how far the export is off."""
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
        # Four classes through one number: a seed that goes past it helps for sure.
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


def examine(growth: bool = True) -> Iterator[Finding]:
    """All findings, as they are made; the growth is last, and only if what it needs is there."""
    needed = requirements()
    yield check_python(platform.python_version(), metadata(PACKAGE)["Requires-Python"])
    yield Finding("esper", "fine", version(PACKAGE))
    packages = list(check_packages(needed))
    yield from packages
    yield check_threads(_cores(), os.environ.get("OMP_NUM_THREADS"))
    yield from check_extras(needed)
    if any(finding.state == "wrong" for finding in packages):
        return
    from esper.tolaria.data.catalogue import data_root

    yield from check_data(data_root())
    yield check_folder("runs", Path("runs"), "go to a folder that is yours, or give --out")
    yield check_folder("data folder", data_root(), "set ESPER_DATA to a folder that is yours")
    temporary = Path(tempfile.gettempdir())
    yield check_folder("temporary", temporary, "free space there, or set TMPDIR")
    if growth:
        yield check_growth()


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class DoctorSettings:
    quiet: bool = option(False, "Print only what is wrong.")
    json: bool = option(False, AS_JSON)


def doctor(settings: DoctorSettings) -> None:
    """See whether everything that Esper needs is there and works.

    Looks at versions, threads, extras, data sets and folders, and grows a tiny network. Each line
    that is not fine ends with its cure. Ends with exit code 1 if something is wrong; an extra or a
    data set that is not there is not wrong.

    Example: esper doctor --json
    """
    from esper.observatory.terminal import say

    _, result = consoles(settings.quiet, settings.json)
    findings: list[Finding] = []
    for finding in examine():
        findings.append(finding)
        if finding.state == "wrong" or not settings.quiet:
            say(result, _in_a_line(finding), whole=True)
    wrong = [finding.about for finding in findings if finding.state == "wrong"]
    if settings.json:
        print_json({"wrong": wrong, "findings": [asdict(each) for each in findings]})
    elif not settings.quiet:
        say(result, f"\nWrong: {', '.join(wrong)}." if wrong else "\nAll is well.")
    if wrong:
        raise typer.Exit(1)


def _in_a_line(finding: Finding) -> str:
    cure = "" if finding.cure is None else f"; {finding.cure}"
    return f"{finding.about:<20} {finding.state:<8} {finding.detail}{cure}"
