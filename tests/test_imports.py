"""Nobody waits for a library that is not used."""

import subprocess
import sys

import pytest

# What integrations, views and statistics are made with; torch takes longest of all.
LIBRARIES = {
    *("gymnasium", "sklearn", "lightning", "transformers", "tensorboard", "wandb", "mlflow"),
    *("ray", "matplotlib", "scipy", "textual", "starlette", "uvicorn", "duckdb"),
    *("pyarrow", "PIL", "onnx", "torch"),
}
USED = {
    "import esper": "import esper; dir(esper); esper.__version__",
    "esper --help": "sys.argv = ['esper', '--help']; main()",
}


@pytest.mark.parametrize("way", USED)
def test_no_library_is_loaded_unless_it_is_used(way: str) -> None:
    code = f"""
import sys
from esper.__main__ import main
try:
    {USED[way]}
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *sorted({LIBRARIES!r} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]
