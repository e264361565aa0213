"""Commands and code of the documents run, and their links are valid."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

import esper.api
import reward_support
from command_support import esper_here
from document_support import (
    DOCS,
    DOCUMENTS,
    ROOT,
    TUTORIALS,
    command_lines,
    fenced,
    own_model,
    python_of,
)
from esper.growth.slot_table import SlotTable
from esper.leyline import LifecycleOp
from esper.simic import analytic
from esper.simic.rewards.modes import MODES, compute_reward
from esper.tolaria.data import catalogue, images

# Run by CI itself, or commands of others.
NOT_OURS = ("make", "pip", "python ", "pytest")
# These take long, or need a network or earlier runs. tests/cli and tests/simic/training run them
# with small settings; here their options must exist.
LONG = ("train", "evaluate", "compare", "query", "data get", "serve", "watch")
SHORTER = ("--steps", "2", "--no-compare")


def commands() -> list[str]:
    """Every command line in a fenced block of a document, without comments."""
    found = []
    ours = ("esper ", ".venv/bin/esper ", *NOT_OURS)
    # Commands of a tutorial are run in order, below.
    for document in DOCUMENTS:
        for language, text in fenced(document) if document not in TUTORIALS else ():
            if language in ("", "console"):
                found += [line for line in command_lines(text) if line.startswith(ours)]
    return sorted(set(found))


def check_options(
    words: Sequence[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command exists, and all options that it is given."""
    names = words[: 2 if words[0] in ("train", "data", "policies") else 1]
    assert esper_here(monkeypatch, *names, "--help", cwd=folder) == 0
    shown = capsys.readouterr().out
    for option in (word for word in words if word.startswith("--")):
        assert option in shown, option


def test_the_documents_show_commands() -> None:
    assert any("esper grow" in command for command in commands())
    assert any("esper train" in command for command in commands())


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith(NOT_OURS)])
def test_every_command_runs(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The doctor reports more threads than cores.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = shlex.split(command)[1:]
    if " ".join(words).startswith(LONG) or "runs/" in command:
        check_options(words, tmp_path, monkeypatch, capsys)
        return
    (tmp_path / "runs").mkdir()
    shorter = SHORTER if words[0] == "grow" else ()
    if "trained" in words:
        # A share of two epochs would not pay for one.
        shorter = ("--steps", "8", "--no-compare")
    assert esper_here(monkeypatch, *words, *shorter, cwd=tmp_path) == 0, capsys.readouterr().err


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {c.split()[1] for c in commands() if c.startswith("make ")}
    assert {"demo", "test"} <= shown <= targets
    assert (ROOT / ".ci" / "run").read_text().strip().endswith("make test")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_python_of_first_pages_runs(page: str) -> None:
    (block,) = python_of(ROOT / page)
    names = {"esper": esper, **own_model()}
    exec(block, names)
    assert isinstance(names["plain"], torch.nn.Module)


def test_the_python_of_settings_runs() -> None:
    (block,) = python_of(DOCS / "growth.md")
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["settings"].trained


GUIDE = python_of(DOCS / "your-model.md")
PAGES = ["gymnasium.md", "integrations.md"]


@pytest.mark.parametrize("number", range(len(GUIDE)))
def test_every_example_of_the_guide_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        exec(GUIDE[number], {"__name__": "example"})


@pytest.mark.heavy
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_integrations_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    blocks = python_of(DOCS / page)
    assert blocks
    with torch.random.fork_rng():
        for block in blocks:
            exec(block, names)


def test_the_python_of_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, _ = python_of(DOCS / "training.md")  # the second needs a cluster: tests/test_ray.py
    (tmp_path / "run.toml").write_text('task = "digits"\nkey = 3\n')
    monkeypatch.chdir(tmp_path)
    train, configs = esper.api.train_ppo, []

    def short(config: Any, out: str) -> None:
        configs.append(config)
        train(replace(config, rounds=1, envs=2, growth=replace(config.growth, steps=3)), out)

    monkeypatch.setattr(esper.api, "train_ppo", short)
    with torch.random.fork_rng():
        names = own_model()
        exec(block, names)
    assert (configs[0].rounds, configs[0].key, configs[0].ppo.learning_rate) == (50, 3, 1e-3)
    assert names["grown"].outcome.controller == "runs/mine"


def test_the_python_of_the_agent_runs() -> None:
    (block,) = python_of(DOCS / "ppo.md")
    sizes = (analytic.OBSERVATION_DIM, analytic.NUM_SLOTS, analytic.NUM_BLUEPRINTS)
    names = dict(zip(("observation_dim", "num_slots", "num_blueprints"), sizes, strict=True))
    names |= {"num_envs": 4, "max_steps": analytic.HORIZON, "rounds": 2, "key": 0}
    exec(block, names | {"env": analytic.AnalyticGrowth(4)})


def test_the_python_of_rewards_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    use, add = python_of(DOCS / "rewards.md")
    table = SlotTable.empty(1, 1)
    transition = reward_support.transition(table, table, op=LifecycleOp.GERMINATE)
    names: dict[str, Any] = {"transition": transition}
    exec(use, names)
    assert names["reward"].total.shape == (1,)
    monkeypatch.setitem(MODES, "wage", None)  # removed after the test
    exec(add, names)
    reward = compute_reward(transition, names["WageConfig"](), 1.0)
    assert reward["wage"].tolist() == [0.1]


def test_the_python_of_data_calls_existing_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = python_of(DOCS / "data.md")
    for module, name in ((catalogue, "get"), (images, "load_cifar10")):
        # Fetching needs a network; the arguments must fit.
        monkeypatch.setattr(module, name, create_autospec(getattr(module, name)))
    exec(block, {})
    assert catalogue.get.call_count == images.load_cifar10.call_count == 1


def test_no_python_is_left_out() -> None:
    covered = {"your-model.md", "training.md", "ppo.md", "rewards.md", "data.md"}
    covered |= {"index.md", "growth.md"}
    run = {ROOT / "README.md", *(DOCS / name for name in covered.union(PAGES)), *TUTORIALS}
    assert {path for path in DOCUMENTS if python_of(path)} <= run


# Commands of a tutorial that are not run: they do not return, or take long.
OPEN, LONGER = ("serve", "watch"), ("--keys 20", "--rounds 200")


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda path: path.stem)
def test_every_block_of_a_tutorial_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names: dict[str, Any] = {"__name__": "tutorial"}
    ran = 0
    with torch.random.fork_rng():
        for language, text in fenced(page):
            assert language in ("python", "console", "text")
            if language == "python":
                exec(text, names)
                ran += 1
            for command in command_lines(text.strip()) if language == "console" else ():
                words = shlex.split(command)[1:]
                if words[0] in OPEN or any(option in command for option in LONGER):
                    check_options(words, tmp_path, monkeypatch, capsys)
                    continue
                code = esper_here(monkeypatch, *words, cwd=tmp_path)
                assert code == 0, (command, capsys.readouterr().err)
                ran += 1
    assert ran >= 6


def test_the_guide_has_an_example_of_each_kind() -> None:
    assert len(GUIDE) == 8


def test_links_are_valid() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_architecture_names_every_package() -> None:
    text = (DOCS / "architecture.md").read_text()
    for folder in (ROOT / "src" / "esper").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"`{folder.name}`" in text, folder.name


def test_paths_on_the_architecture_page_exist() -> None:
    text = re.sub(r"^```.*?^```", "", (DOCS / "architecture.md").read_text(), flags=re.M | re.S)
    paths = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|\w+\.py)`", text)
    assert len(paths) > 40
    for path in paths:
        assert any((root / path).exists() for root in (ROOT, ROOT / "src" / "esper")), path


def test_every_decision_is_linked_from_a_page() -> None:
    decisions = set((DOCS / "decisions").glob("*.md"))
    assert len(decisions) <= 20
    linked = {
        (page.parent / target).resolve()
        for page in DOCUMENTS
        if page not in decisions
        for target in re.findall(r"\]\(([^)#]+)", page.read_text())
    }
    assert decisions <= linked
