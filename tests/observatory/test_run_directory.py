import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from esper.leyline import ConfigError
from esper.leyline.events import HostStabilized
from esper.observatory.run_directory import (
    OWN,
    RunDirectory,
    episode_script,
    read_rows,
    write_summary,
)
from view_support import row


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", {"key": 1}) as run:
        run.metrics(row(0))
        assert len(list(read_rows(run.path / "metrics.jsonl"))) == 1
        run.event(HostStabilized(env=0, step=3, val_loss=0.5))
        (event,) = read_rows(run.path / "events.jsonl")
    assert event == {"event": "HostStabilized", "env": 0, "step": 3, "val_loss": 0.5}


def test_a_line_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(0)) + "\n" + '{"kind": "st')
    assert [r["step"] for r in read_rows(path)] == [0]


def test_the_config_is_toml(tmp_path: Path) -> None:
    config = {"task": 'a "quoted" name\n', "key": 3, "rate": 0.5, "flag": True, "limit": None}
    RunDirectory.create(tmp_path / "run", config).close()
    text = (tmp_path / "run" / "config.toml").read_text()
    assert tomllib.loads(text) == {k: v for k, v in config.items() if v is not None}
    assert "# limit is not set" in text


def test_not_a_number_is_never_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {})
    with run, pytest.raises(ValueError, match="not JSON"):
        run.metrics({"value": float("nan")})


def test_actions_are_recorded_as_a_script_live_and_from_the_rows_of_any_episode(
    tmp_path: Path,
) -> None:
    steps = [
        row(1, op="GERMINATE", slot="blocks.0", blueprint="norm", blend="gated"),
        row(2),
        row(3, op="CULL", slot="blocks.0"),
        row(3, op="CULL", slot="layer1", env=1),
    ]
    with RunDirectory.create(tmp_path / "one", {}, script=True) as run:
        for step in steps:
            run.metrics(step)
        live = (run.path / "actions.txt").read_text()
    assert live.split("\n") == [
        "# step  op  module  blueprint  blend",
        "1  GERMINATE  blocks.0  norm  gated",
        "3  CULL  blocks.0",
        "",
    ]
    with RunDirectory.create(tmp_path / "many", {}) as run:
        for number in range(2):
            run.begin_round(number)
            for step in steps if number == 1 else steps[:2]:
                run.metrics(step)
            run.metrics({"kind": "round", "return": 0.5})
    assert episode_script(run.path, 1, 0) == live
    assert episode_script(run.path, 1, 1).split("\n")[1:] == ["3  CULL  layer1", ""]
    assert len(episode_script(run.path, 0, 0).split("\n")) == 3
    assert not (run.path / "actions.txt").exists()


def test_a_folder_with_a_run_or_without_permission_is_refused(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", {}).close()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDirectory.create(tmp_path / "run", {})
    RunDirectory.create(tmp_path / "run", {}, overwrite=True).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        RunDirectory.create(tmp_path / "file" / "run", {})


@pytest.mark.parametrize("name", OWN)
def test_whatever_a_run_leaves_keeps_others_out_and_goes_with_overwrite(
    tmp_path: Path, name: str
) -> None:
    RunDirectory(tmp_path).close()
    left = tmp_path / name
    left.mkdir() if "." not in name else left.write_text("")
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDirectory.create(tmp_path, {})
    RunDirectory.create(tmp_path, {}, overwrite=True).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".lock", "config.toml", "events.jsonl", "metrics.jsonl", "mine.txt", "outcomes.jsonl")
    ]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_no_run_has_left_is_never_taken_for_one(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "config.toml").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"holds a config\.toml but no run"):
        RunDirectory.create(tmp_path, {}, overwrite=overwrite)
    assert (tmp_path / "config.toml").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "config.toml"]


FILL = """
import resource, signal, sys
from pathlib import Path
from esper.observatory.run_directory import RunDirectory, write_summary
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
run = RunDirectory.create(Path(sys.argv[1]), {})
try:
    if sys.argv[2] == "rows":
        for step in range(1000):
            run.metrics({"kind": "step", "step": step, "text": "x" * 50})
    else:
        write_summary(run.path, [{"text": "x" * 30_000}])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(("what", "name"), [("rows", "metrics.jsonl"), ("all", "summary.json")])
def test_a_disk_that_takes_no_more_is_one_sentence(tmp_path: Path, what: str, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path / "run"), what], capture_output=True, text=True
    )
    said = f"ConfigError: {tmp_path / 'run' / name} could not be written: File too large; "
    assert done.stdout.startswith(said), done.stderr
    assert done.stdout.count("\n") == 1


def test_a_summary_replaces_the_one_before(tmp_path: Path) -> None:
    for score in (1.0, 2.0):
        write_summary(tmp_path, [{"arm": "grown", "test_score": score}])
    (row,) = json.loads((tmp_path / "summary.json").read_text())
    assert row["test_score"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
