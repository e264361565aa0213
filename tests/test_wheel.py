"""The wheel: it builds, holds what it must and nothing else, and every extra works alone."""

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from wheels import PROJECT, ROOT, USES, build, install, site_packages

NAME = "esper-grow"
GATHERED = {"demo", "dev"}
# Those that are doors of ours, which say what to install.
DOORS = (
    "gym",
    "sklearn",
    "lightning",
    "transformers",
    "tensorboard",
    "wandb",
    "mlflow",
    "ray",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def told(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(told: Message, extra: str) -> list[Requirement]:
    """What an extra asks for beyond the core; what it gathers of other extras is spelt out."""
    found = []
    for text in told.get_all("Requires-Dist"):
        item = Requirement(text)
        if item.marker is None or not item.marker.evaluate({"extra": extra}):
            continue
        if canonicalize_name(item.name) == NAME:
            found += [each for inner in item.extras for each in requirements(told, inner)]
        else:
            found.append(item)
    return found


@pytest.mark.heavy
def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    ours = {
        path.relative_to(source).as_posix()
        for path in source.glob("esper/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    (about,) = {name.split("/")[0] for name in held if ".dist-info/" in name}
    assert {name for name in held if not name.startswith(f"{about}/")} == ours
    assert {"esper/py.typed", "esper/observatory/web/views.js"} <= held
    assert f"{about}/licenses/LICENSE" in held


@pytest.mark.heavy
def test_every_extra_asks_for_packages_that_exist_at_versions_that_do(told: Message) -> None:
    assert set(told.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    for extra in told.get_all("Provides-Extra"):
        wanted = requirements(told, extra)
        assert wanted, extra
        for item in wanted:
            version = importlib.metadata.version(item.name)
            assert item.specifier.contains(version, prereleases=True), f"{extra}: {item}, {version}"


def test_every_extra_has_something_that_uses_it() -> None:
    assert set(USES) == set(PROJECT["optional-dependencies"]) - GATHERED
    assert set(DOORS) <= set(USES)


def closure(items: list[Requirement]) -> set[str]:
    """The installed distributions that come with these requirements."""
    found: set[str] = set()
    waiting = [(item.name, frozenset(item.extras)) for item in items]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system or Python
        found.add(canonicalize_name(name))
        for text in distribution.requires or []:
            item = Requirement(text)
            wanted = item.marker is None or any(
                item.marker.evaluate({"extra": extra}) for extra in (*extras, "")
            )
            step = (item.name, frozenset(item.extras))
            if wanted and step not in seen:
                seen.add(step)
                waiting.append(step)
    return found


def modules_of_others(owners: Mapping[str, list[str]], allowed: set[str]) -> Iterator[str]:
    """Top-level modules that only distributions outside `allowed` have."""
    for module, names in owners.items():
        if module != "esper" and not {canonicalize_name(name) for name in names} & allowed:
            yield module


@pytest.mark.heavy
def test_every_extra_works_with_its_own_packages_alone(told: Message, tmp_path: Path) -> None:
    core = [item for item in map(Requirement, told.get_all("Requires-Dist")) if item.marker is None]
    needed = {
        extra: {canonicalize_name(item.name) for item in requirements(told, extra)}
        for extra in USES
    }
    owners = importlib.metadata.packages_distributions()
    installed = {canonicalize_name(each.name) for each in importlib.metadata.distributions()}
    cases = {}
    for extra, code in USES.items():
        allowed = closure([*core, *requirements(told, extra)])
        others = {other: USES[other] for other in DOORS if not needed[other] <= allowed}
        hidden = sorted({*modules_of_others(owners, allowed), *(installed - allowed - {NAME})})
        cases[extra] = {"hidden": hidden, "use": code, "others": others}
    assert {len(case["others"]) for case in cases.values()} <= {7, 8, 9}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    words = [sys.executable, str(Path(__file__).with_name("extras_alone.py")), "cases.json"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "ESPER_DATA": "nowhere"}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{extra} works" for extra in USES], done.stderr
    assert done.returncode == 0


@pytest.mark.soak
@pytest.mark.parametrize("extra", USES)
def test_it_installs_with_each_extra_alone(
    extra: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    core = tmp_path_factory.getbasetemp() / "core"
    if not core.exists():
        install(wheel, core, None, None)
    install(wheel, tmp_path_factory.mktemp(extra) / "env", extra, site_packages(core))
