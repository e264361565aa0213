"""Loads every saved export of a folder where `import esper` fails, and compares its output.

A script of its own: FOLDER with files (name, module, input, outputs), FOLDER of the models' code.
A module of None is a program beside the file.
"""

import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for entry in value.values() for t in tensors_in(entry)]
    if isinstance(value, (list, tuple)):
        return [t for entry in value for t in tensors_in(entry)]
    return tensors_in(vars(value)) if is_dataclass(value) else []


def output_of(model: torch.nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


if __name__ == "__main__":
    folder, code = sys.argv[1:]
    sys.modules["esper"] = None  # type: ignore[assignment]
    sys.path.insert(0, code)
    torch.set_num_threads(1)
    files = sorted(Path(folder).glob("*.pt"))
    for file in files:
        name, model, x, expected = torch.load(file, weights_only=False)
        model = model or torch.export.load(file.with_suffix(".pt2")).module()
        with torch.no_grad():
            found = tensors_in(output_of(model, x))
        assert len(found) == len(expected), name
        close = [torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True)]
        assert all(close), name
    print(len(files), "exports equal")
