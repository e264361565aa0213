"""Ctrl-C at any moment: no traceback, and nothing lost; two commands into one folder."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_support import esper_here, start_esper
from esper.leyline import ConfigError
from esper.observatory.evaluation import evaluation_folder
from esper.observatory.query import query
from esper.observatory.run_directory import RunDirectory, read_rows
from view_support import outcome, write_run

LONG_QUERY = "select sum(a.range * b.range) from range(99999999) a, range(99999999) b"


# Ctrl-C comes at the moment when a module is first looked for.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
module = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, *rest):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from esper.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["esper.cli", "typer", "rich.console", "numpy", "torch"])
def test_the_first_moments(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module, "grow", "--steps", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 130, done.stderr
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_a_query(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [outcome()])
    process = start_esper("query", "run", LONG_QUERY, cwd=tmp_path)
    time.sleep(4.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said


def test_a_query_ends_when_its_time_is_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [outcome()])
    with pytest.raises(ConfigError, match=r"took longer than 0\.1 seconds"):
        query(run, LONG_QUERY, timeout=0.1)


def test_a_query_shows_as_many_rows_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", [outcome()])
    words = ("query", "run", "select range from range(1000000000)", "--limit")
    assert esper_here(monkeypatch, *words, "3", cwd=tmp_path) == 0
    said = capsys.readouterr().out
    assert said.split()[:4] == ["range", "0", "1", "2"]
    assert "more rows than these 3; --limit shows more" in said
    few = ("query", "run", "select range from range(3)", "--limit", "3")
    assert esper_here(monkeypatch, *few, cwd=tmp_path) == 0
    assert "--limit" not in capsys.readouterr().out


def test_a_run_that_began_after_the_command_is_not_overwritten(tmp_path: Path) -> None:
    """As when a second command waited so long for its data that the first one is done."""
    before, later = time.time() - 10.0, time.time() + 10.0
    RunDirectory.create(tmp_path / "run", {"key": 1}).close()
    with pytest.raises(ConfigError, match="another run has started in"):
        RunDirectory.create(tmp_path / "run", {"key": 2}, overwrite=True, since=before)
    assert "key = 1" in (tmp_path / "run" / "config.toml").read_text()
    RunDirectory.create(tmp_path / "run", {"key": 2}, overwrite=True, since=later).close()
    assert "key = 2" in (tmp_path / "run" / "config.toml").read_text()


def test_of_two_that_overwrite_one_folder_one_is_refused(tmp_path: Path) -> None:
    words = ("grow", "--steps", "1", "--no-compare", "--out", "run", "--overwrite", "--key")
    processes = [start_esper(*words, str(key), cwd=tmp_path) for key in (1, 2)]
    said = [process.communicate(timeout=240)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2], said
    refused = said[codes.index(2)]
    assert "in use by another run" in refused or "another run has started" in refused
    (row,) = read_rows(tmp_path / "run" / "outcomes.jsonl")
    assert row["key"] == codes.index(0) + 1
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize(
    "sql",
    [
        "select length(repeat('ab', 1000000000))",
        pytest.param("select list_sort(range(200000000))", marks=pytest.mark.soak),
    ],
)
def test_what_duckdb_cannot_interrupt_ends_all_the_same(sql: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [outcome()])
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(ConfigError, match=r"took longer than 0\.5 seconds"):
        query(run, sql, timeout=0.5)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10
    process = start_esper("query", "run", sql, cwd=tmp_path)
    time.sleep(4.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=10)
    assert (process.returncode, "Traceback" in said) == (130, False)


def stop_when(process: subprocess.Popen[str], file: Path, number: int) -> tuple[int, str]:
    """Send a signal as soon as the file has content; the exit code, and what was printed."""
    began = time.monotonic()
    while not (file.is_file() and file.stat().st_size) and process.poll() is None:
        assert time.monotonic() - began < 120
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


LONG_COMMANDS = {
    "grow": (["grow", "--steps", "5000"], "metrics.jsonl", [0], "--resume"),
    "evaluate": (
        ["evaluate", "--arms", "static", "--keys", "500", "--steps", "1"],
        "runs.jsonl",
        [0, 130],
        "--resume",
    ),
    "train ppo": (
        ["train", "ppo", "--envs", "2", "--rounds", "500"],
        "metrics.jsonl",
        [0],
        "--resume",
    ),
    "train record": (
        ["train", "record", "--episodes", "5000"], "config.toml", [130], "--overwrite"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG_COMMANDS)
def test_sigterm_stops_like_ctrl_c_and_the_command_says_how_to_go_on(
    name: str, tmp_path: Path
) -> None:
    words, file, codes, flag = LONG_COMMANDS[name]
    process = start_esper(*words, "--out", "run", cwd=tmp_path)
    code, said = stop_when(process, tmp_path / "run" / file, signal.SIGTERM)
    assert code in codes, said
    assert "Traceback" not in said
    (advice,) = [line for line in said.splitlines() if "esper " in line and flag in line]
    assert f"esper {name}" in advice


def test_a_training_run_whose_folder_is_deleted_fails(tmp_path: Path) -> None:
    process = start_esper(
        "train", "ppo", "--envs", "2", "--rounds", "3", "--out", "run", cwd=tmp_path
    )
    began = time.monotonic()
    while not (tmp_path / "run" / "checkpoints" / "round-000000" / "manifest.json").exists():
        assert time.monotonic() - began < 120
        assert process.poll() is None
        time.sleep(0.05)
    shutil.rmtree(tmp_path / "run")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 2, said
    assert "was deleted or replaced" in said
    assert not (tmp_path / "run").exists()


def test_grow_and_evaluate_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDirectory.create(tmp_path / "run", {"key": 1}).close()
    with evaluation_folder(tmp_path / "evaluation", overwrite=False, resume=False):
        pass
    for words, what in (
        (("evaluate", "--out", "run"), "a run"),
        (("grow", "--out", "evaluation"), "an evaluation"),
        (("train", "ppo", "--out", "evaluation"), "an evaluation"),
    ):
        for more in ((), ("--overwrite",)):
            assert esper_here(monkeypatch, *words, *more, cwd=tmp_path) == 2
            assert f"holds {what}" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.toml").is_file()
