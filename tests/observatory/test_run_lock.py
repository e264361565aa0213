"""Only one process at a time writes to a run, and a killed one does not stand in the way."""

import subprocess
import sys
from pathlib import Path

import pytest

import esper
from command_support import esper_here
from esper.api.training import resume_ppo
from esper.leyline import ConfigError
from esper.observatory.run_directory import RunDirectory
from esper.observatory.summaries import compare_runs
from esper.simic.training.loop import Hooks
from training_support import same_run, tiny_run, tiny_task

HOLDER = """
import sys, time
from pathlib import Path
from esper.observatory.run_directory import RunDirectory
record = RunDirectory(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tiny_run(tmp_path / "run", rounds=1)
    return tmp_path / "run"


def test_a_run_that_is_going_on_cannot_be_resumed_or_overwritten_and_goes_on_exactly(tmp_path):
    refusals = []

    def intrude(step: int) -> None:
        if step == 5:
            before = contents(tmp_path / "run")
            for attempt in (
                lambda: resume_ppo(tmp_path / "run", task=tiny_task()),
                lambda: RunDirectory.create(tmp_path / "run", {}, overwrite=True),
            ):
                with pytest.raises(ConfigError, match="run is in use by another run"):
                    attempt()
                refusals.append(attempt)
            assert contents(tmp_path / "run") == before

    tiny_run(tmp_path / "run", rounds=2, hooks=Hooks(on_step=intrude))
    assert len(refusals) == 4
    tiny_run(tmp_path / "alone", rounds=2)
    same_run(tmp_path / "alone", tmp_path / "run")


def test_a_killed_process_leaves_the_run_free(run):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="in use"):
            resume_ppo(run, task=tiny_task())
        holder.kill()
    assert resume_ppo(run, task=tiny_task(), rounds=2).round == 2


GROW = ("grow", "--steps", "1", "--overwrite", "--out")
RESUME = ("train", "ppo", "--resume")
OVERWRITE = ("train", "ppo", "--overwrite", "--envs", "1", "--out")


@pytest.mark.parametrize("words", [GROW, RESUME, OVERWRITE])
def test_the_command_is_refused_in_one_sentence(run, words, monkeypatch, capsys):
    with RunDirectory(run):
        before = contents(run)
        assert esper_here(monkeypatch, *words, str(run)) == 2
        assert contents(run) == before
    said = capsys.readouterr().err
    assert said.startswith(f"esper: {run} is in use by another run")
    assert said.count("\n") == 1


def test_readers_do_not_wait(run):
    with RunDirectory(run):
        assert esper.load_policy(run).name == str(run)
        assert compare_runs([run])[0]["episodes"] == 4


def test_a_refused_start_gives_the_lock_back(tmp_path):
    (tmp_path / "run" / "config.toml").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    kept = []
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot write to") as refusal:
            RunDirectory.create(tmp_path / "run", {}, overwrite=True)
        kept.append(refusal)  # with all that its frames hold


def test_a_folder_that_cannot_be_locked_is_one_sentence(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match="cannot write to"):
        RunDirectory(tmp_path)


def test_grow_holds_its_folder_until_the_comparison_is_over(tmp_path, monkeypatch):
    run, refused = tmp_path / "run", []

    def intrude(self, outcome) -> None:
        with pytest.raises(ConfigError, match="in use by another run"):
            RunDirectory.create(run, {}, overwrite=True)
        refused.append(self.path.name)
        tell(self, outcome)

    tell = RunDirectory.outcome
    monkeypatch.setattr(RunDirectory, "outcome", intrude)
    assert esper_here(monkeypatch, *GROW, str(run)) == 0
    assert refused == ["run", "host-alone"]
    RunDirectory.create(run, {}, overwrite=True).close()
