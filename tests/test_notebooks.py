"""The notebooks run, and their outputs are of the kinds that the site shows."""

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from notebook_runs import NOTEBOOKS, executed

pytestmark = pytest.mark.heavy


def kinds(notebook: Any) -> list[list[tuple[str, ...]]]:
    """The kinds of outputs of every code cell, not their content."""
    return [
        [(output.output_type, *sorted(output.get("data", ()))) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["own-model", "read-a-run", "train-a-policy"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_with_the_saved_kinds_of_outputs(path: Path, tmp_path: Path) -> None:
    before = nbformat.read(path, as_version=4)
    after = executed(path, tmp_path)
    assert kinds(after) == kinds(before)
    assert any(kinds(after))


def test_the_kernel_is_this_interpreter(tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell("import sys, esper\nprint(sys.executable, esper.__file__)")
    path = tmp_path / "who.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    import esper

    (output,) = executed(path, tmp_path).cells[0].outputs
    assert output.text.split() == [sys.executable, esper.__file__]
