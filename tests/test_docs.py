"""What the documents say is true: commands and code run, links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from architectures import MLP

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ESPER = [sys.executable, "-c", "from esper.cli import main; main()"]
# Long or needing a network: run by CI itself (make), or tested with small settings elsewhere.
NOT_HERE = ("make", "pip", "python benchmarks", "pytest", "esper data get", "esper evaluate")
SHORTER = ("--steps", "2", "--no-compare")


def commands() -> list[str]:
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```console\n(.*?)```", document.read_text(), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line[2:].split("#")[0].strip() for line in lines if line.startswith("$ ")]
    return sorted(set(found))


def test_the_documents_show_commands() -> None:
    assert any("esper grow" in command for command in commands())


@pytest.mark.parametrize("command", commands())
def test_every_command_runs(command: str, tmp_path: Path) -> None:
    if command.startswith(NOT_HERE) or command.startswith("esper train"):
        pytest.skip("run elsewhere")
    words = shlex.split(command)
    assert words[0].endswith("esper"), f"a command this test does not know: {command}"
    short = SHORTER if words[1] == "grow" else ()
    done = subprocess.run(
        [*ESPER, *words[1:], *short], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {c.split()[1] for c in commands() if c.startswith("make ")}
    assert {"demo", "test"} <= shown <= targets
    assert (ROOT / ".ci" / "run").read_text().strip().endswith("make test")


def test_the_python_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
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


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_map_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for folder in (ROOT / "src" / "esper").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"`{folder.name}`" in text, folder.name
