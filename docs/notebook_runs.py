"""Execute the notebooks of the site and store their outputs.

    python docs/notebook_runs.py [NAME ...]

They run in an empty folder, with the interpreter that runs this.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent / "notebooks").glob("*.ipynb"))
# Warnings of libraries on this machine do not belong on the page.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class ThisPython(AsyncKernelManager):
    """A kernel of this interpreter, whatever kernels are installed; by files, without ports."""

    def __init__(self, **settings: Any) -> None:
        # The kernel has another working directory, so the path must be absolute.
        self.sockets = tempfile.TemporaryDirectory()
        super().__init__(transport="ipc", ip=f"{self.sockets.name}/kernel", **settings)

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, language="python", display_name="Python 3")


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs; raises CellExecutionError with the cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=None,
        startup_timeout=600,
        kernel_manager_class=ThisPython,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    return client.execute(env=os.environ | ENVIRONMENT)


def main() -> None:
    for path in NOTEBOOKS:
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                notebook = executed(path, Path(folder))
            notebook.metadata.pop("language_info", None)
            nbformat.write(notebook, path)
            print(path.name)


if __name__ == "__main__":
    main()
