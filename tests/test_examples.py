"""Every example runs as it is, in an empty folder, and says something."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
# Options that make an example short, by its name; without an entry it is run as it stands.
SHORTER: dict[str, list[str]] = {
    "gym_cleanrl.py": ["--total-steps", "1024"],
    "gym_sb3.py": ["--steps", "512"],
    "gym_torchrl.py": ["--steps", "512"],
    "sklearn_table.py": ["--folds", "2", "--steps", "3"],
    "tune_with_optuna.py": ["--trials", "2", "--keys", "1", "--steps", "1"],
}


@pytest.mark.heavy
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), *SHORTER.get(example.name, [])])
    with torch.random.fork_rng():
        runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_shortened_examples_exist() -> None:
    assert set(SHORTER) <= {example.name for example in EXAMPLES}
