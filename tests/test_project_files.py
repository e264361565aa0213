"""Files for other programs: the names in them exist and agree with the project's metadata."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CONTAINER = (ROOT / "Containerfile").read_text()
COPIED = [
    source
    for line in re.findall(r"^COPY (.+)$", CONTAINER, re.MULTILINE)
    for source in line.split()[:-1]
]


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (str(cited["version"]), cited["license"]) == (PROJECT["version"], PROJECT["license"])


def test_there_are_templates() -> None:
    assert len(TEMPLATES) == 2


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_issue_templates_are_complete(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    ids = [item["id"] for item in form["body"]]
    assert len(set(ids)) == len(ids)
    for item in form["body"]:
        assert item["type"] in ("input", "textarea", "dropdown", "checkboxes", "markdown")
        assert item["attributes"]["label"]


def test_files_that_the_container_copies_exist() -> None:
    assert COPIED
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    for source in COPIED:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored


def test_the_container_copies_what_its_build_needs() -> None:
    assert {"pyproject.toml", "constraints.txt", "src", PROJECT["readme"]} <= set(COPIED)
    assert set(PROJECT["license-files"]) <= set(COPIED)


def test_the_container_installs_existing_extras_and_runs_an_existing_script() -> None:
    extras = re.search(r"'\.\[(.+)\]'", CONTAINER).group(1).split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    (entry,) = json.loads(re.search(r"^ENTRYPOINT (.+)$", CONTAINER, re.MULTILINE).group(1))
    assert entry in PROJECT["scripts"]


def test_the_container_has_a_supported_python() -> None:
    version = re.search(r"^FROM python:([\d.]+)-slim$", CONTAINER, re.MULTILINE).group(1)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
