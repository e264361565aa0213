"""Does the wheel install with each extra alone, and does what the extra is for work then?

    python benchmarks/wheels.py [EXTRA ...]

Builds the wheel and installs it, with constraints.txt, into a fresh environment; then, for each
extra (default: all), into another one that sees what the first has and nothing else. Each must pass
`pip check` and use what the extra is for. The first takes about a gigabyte of disk. The last line
is one JSON object: megabytes and packages that each extra adds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# For each extra, code that needs it: the example that its users would begin with.
USES = {
    "digits": "from esper.tolaria.data.catalogue import data_root\n"
    "from esper.tolaria.tasks import find_task\n"
    "find_task('digits').load(data_root())",
    "data": "import esper.tolaria.data.fetch\nfrom PIL import Image",
    "plot": "from esper.observatory.picture import require_matplotlib\nrequire_matplotlib()",
    "onnx": "import onnx, onnxruntime, onnxscript",
    "evaluate": "from esper.proof.statistics import paired_difference\n"
    "assert paired_difference([1.0, 2.0, 4.0], [0.0, 1.5, 1.0]).low > 0",
    "query": "from esper.observatory import query\nimport duckdb",
    "serve": "import esper.observatory.server, uvicorn",
    "watch": "import esper.observatory.watch_app",
    "gym": "import esper\nesper.gym\nimport gymnasium\n"
    "gymnasium.make('esper/AnalyticGrowth-v0').reset(seed=0)",
    "sklearn": "import esper\nesper.sklearn.GrowingClassifier()",
    "lightning": "import esper\nesper.lightning.Grow(slots=['a'], monitor='val_loss')",
    "transformers": "import esper\nesper.transformers.GrowCallback(slots=['a'])",
    "tensorboard": "import esper\nesper.trackers.TensorBoard('logs')",
    "wandb": "import esper\nesper.trackers.WandB('logs')",
    "mlflow": "import esper\nesper.trackers.MLflow('logs')",
    "ray": "import esper.ray",
    "docs": "import mkdocs, mkdocstrings, mkdocstrings_handlers.python, pymdownx",
}


def build(folder: Path) -> Path:
    """The wheel, made with the backend that is installed."""
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    pip(Path(sys.executable), *words, str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def pip(python: Path, *words: str) -> None:
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env.pop("PYTHONPATH", None)
    subprocess.run([python, "-m", "pip", *words], check=True, env=env)


def new_environment(folder: Path, base: Path | None = None) -> Path:
    """Its Python. With `base`, the site-packages of another, what is there can be seen too."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if base is not None:
        (site_packages(folder) / "base.pth").write_text(f"{base}\n")
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found


def size(folder: Path) -> tuple[int, int]:
    """Megabytes and packages."""
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return round(held / 1e6), len(list(folder.glob("*.dist-info")))


def install(wheel: Path, folder: Path, extra: str | None, base: Path | None) -> dict[str, int]:
    python = new_environment(folder, base)
    before = size(site_packages(folder))
    wanted = str(wheel) if extra is None else f"{wheel}[{extra}]"
    pip(python, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), wanted)
    pip(python, "check")
    code = "import esper.api" if extra is None else USES[extra]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-c", code], check=True, env=env, cwd=folder)
    megabytes, packages = size(site_packages(folder))
    return {"megabytes": megabytes - before[0], "packages": packages - before[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", nargs="*", default=list(USES))
    extras = parser.parse_args().extras
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        found = {"core": install(wheel, folder / "core", None, None)}
        print(f"core: {found['core']}", flush=True)
        for extra in extras:
            base = site_packages(folder / "core")
            found[extra] = install(wheel, folder / extra, extra, base)
            print(f"{extra}: {found[extra]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
