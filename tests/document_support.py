"""Blocks of documents, and the names that short examples take for granted."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from architectures import MLP

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# The blocks of these pages follow each other.
TUTORIALS = [DOCS / "getting-started.md", DOCS / "command-line.md"]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def fenced(document: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every fenced block of a document."""
    parts = re.split(r"^```(.*)\n", document.read_text() + "\n", flags=re.MULTILINE)
    yield from zip(parts[1::4], parts[2::4], strict=False)


def python_of(document: Path) -> list[str]:
    return [text for language, text in fenced(document) if language == "python"]


def command_lines(text: str) -> list[str]:
    """The lines of a block of commands, without prompts and comments."""
    return [line.removeprefix("$ ").split(" #")[0].strip() for line in text.split("\n")]


def own_model() -> dict[str, Any]:
    """A model with data, an optimizer and a training loop, under the names of short examples."""
    y = torch.arange(60) % 5
    data = TensorDataset(torch.randn(60, 20) + y[:, None], y)
    model = MLP()

    def train_one_epoch(model: Any, optimizer: Any) -> None:
        for inputs, target in DataLoader(data, 20):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()

    def validation_accuracy() -> float:
        with torch.no_grad():
            return 100.0 * float((model(data.tensors[0]).argmax(1) == y).float().mean())

    return {
        "model": model,
        "x": data.tensors[0][:2],
        "train_loader": DataLoader(data, 20),
        "val_loader": DataLoader(data, 20),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "train_one_epoch": train_one_epoch,
        "validation_accuracy": validation_accuracy,
    }
