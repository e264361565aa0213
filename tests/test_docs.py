"""What the documents say is true: commands and code run, links lead somewhere."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from architectures import MLP
from command_support import esper_here

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Run by CI itself, or not a command of ours.
NOT_OURS = ("make", "pip", "python ", "pytest")
# Long, or in need of a network or of earlier runs: what they do is tested with small settings in
# tests/cli and tests/simic/training; here their options must exist.
LONG = ("train", "evaluate", "tune", "compare", "query", "data get", "serve", "watch")
SHORTER = ("--steps", "2", "--no-compare")


def fenced(document: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every fenced block of a document."""
    parts = re.split(r"^```(.*)\n", document.read_text() + "\n", flags=re.MULTILINE)
    yield from zip(parts[1::4], parts[2::4], strict=False)


def commands() -> list[str]:
    """Every command line in a fenced block of a document, without comments."""
    found = []
    for document in DOCUMENTS:
        for language, text in fenced(document):
            if language in ("", "console"):
                lines = [
                    line.removeprefix("$ ").split(" #")[0].strip() for line in text.split("\n")
                ]
                ours = ("esper ", ".venv/bin/esper ", *NOT_OURS)
                found += [line for line in lines if line.startswith(ours)]
    return sorted(set(found))


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
    # The doctor finds fault with more threads than cores, wherever the tests are run.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = shlex.split(command)[1:]
    if " ".join(words).startswith(LONG) or "runs/" in command:
        names = words[: 2 if words[0] in ("train", "data", "policies") else 1]
        assert esper_here(monkeypatch, *names, "--help", cwd=tmp_path) == 0
        shown = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, option
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


def test_the_python_of_the_readme_runs() -> None:
    blocks = [text for language, text in fenced(ROOT / "README.md") if language == "python"]
    assert len(blocks) == 2
    y = torch.arange(60) % 5
    data = TensorDataset(torch.randn(60, 20) + y[:, None], y)
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_one_epoch(model: Any, optimizer: Any) -> None:
        for inputs, target in DataLoader(data, 20):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()

    def validation_accuracy() -> float:
        with torch.no_grad():
            return 100.0 * float((model(data.tensors[0]).argmax(1) == y).float().mean())

    names: dict[str, Any] = {
        "model": model,
        "x": data.tensors[0][:2],
        "train_loader": DataLoader(data, 20),
        "val_loader": DataLoader(data, 20),
        "optimizer": optimizer,
        "train_one_epoch": train_one_epoch,
        "validation_accuracy": validation_accuracy,
    }
    for block in blocks:
        exec(block, names)
        names["model"] = model = MLP()
        names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert isinstance(names["plain"], torch.nn.Module)


GUIDE = [text for language, text in fenced(ROOT / "docs" / "your-model.md") if language == "python"]
PAGES = [
    *("gymnasium.md", "lightning.md", "sklearn.md", "trackers.md", "transformers.md"),
    "tuning.md",
]


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
    blocks = [text for language, text in fenced(ROOT / "docs" / page) if language == "python"]
    assert blocks
    with torch.random.fork_rng():
        for block in blocks:
            exec(block, names)


def test_the_guide_has_an_example_of_each_kind() -> None:
    assert len(GUIDE) == 7


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_map_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for folder in (ROOT / "src" / "esper").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"`{folder.name}`" in text, folder.name
