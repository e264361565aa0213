"""Every script under benchmarks/ finds what it imports: most of them are run once in months."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_it_finds_what_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As `python benchmarks/...` has it: its own folder first, two scripts share a name.
    monkeypatch.syspath_prepend(str((FOLDER / script).parent))
    name = "benchmark_" + "_".join(script.with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(name, FOLDER / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
