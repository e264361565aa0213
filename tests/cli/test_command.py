"""The command as a user meets it; in a process of its own where that matters."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from command_support import esper, esper_here, start_esper
from esper.observatory.run_directory import read_rows


def test_help_teaches_and_does_not_wait_for_torch(tmp_path: Path) -> None:
    result = esper("--help", cwd=tmp_path)
    assert result.returncode == 0
    for word in ("grow", "tasks", "blueprints", "data", "esper grow --task digits"):
        assert word in result.stdout
    code = (
        "import sys\nfrom esper.cli import main\nsys.argv = ['esper', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_version(tmp_path: Path) -> None:
    assert esper("--version", cwd=tmp_path).stdout == "esper 0.1.0\n"


def test_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*words: str) -> str:
        assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
        return capsys.readouterr().out

    tasks = shown("tasks")
    for name in ("digits", "pydocs", "mnist", "fashion_mnist", "cifar10_blind", "linuxdocs"):
        assert name in tasks
    assert "embedded" in tasks
    assert "missing" in tasks
    blueprints = shown("blueprints")
    assert "conv_light" in blueprints
    data = shown("data", "list")
    assert "cifar10" in data
    assert "nowhere" in data


def test_grow_leaves_a_table_a_picture_a_model_and_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("grow", "--steps", "12", "--controller", "scripted:early")
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 0
    shown = capsys.readouterr().out
    run = tmp_path / "runs" / "digits-scripted-early-0"
    for heading in ("host alone", "grown", "from scratch", "test accuracy", "parameters"):
        assert heading in shown
    assert (run / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert str(run.relative_to(tmp_path) / "growth.png") in shown
    (outcome,) = read_rows(run / "outcomes.jsonl")
    assert outcome["steps"] == 12
    summary = {row["arm"]: row for row in json.loads((run / "summary.json").read_text())}
    assert summary["grown"]["params"] == outcome["params"]
    assert summary["from scratch"]["params"] == summary["grown"]["params"]
    assert summary["host alone"]["params"] == 496
    program = torch.export.load(run / "model.pt2").module()
    assert program(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    assert "key = 0" in (run / "config.toml").read_text()


def test_the_same_key_gives_the_same_bytes_and_the_record_repeats_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("grow", "--steps", "6", "--no-compare", "--key", "5", "--controller")
    assert esper(*words, "random", "--out", "a", cwd=tmp_path).returncode == 0
    assert esper_here(monkeypatch, *words, "random", "--out", "b", cwd=tmp_path) == 0
    for name in ("outcomes.jsonl", "metrics.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    again = ("scripted:a/actions.txt", "--out", "c")
    assert esper_here(monkeypatch, *words, *again, cwd=tmp_path) == 0
    scores = [
        [row["val_score"] for row in read_rows(tmp_path / out / "metrics.jsonl")]
        for out in ("a", "c")
    ]
    assert scores[0] == scores[1]


def test_ctrl_c_saves_what_was_reached(tmp_path: Path) -> None:
    process = start_esper("grow", "--steps", "5000", "--out", "run", cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and len(list(read_rows(metrics))) >= 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "Interrupted" in out
    (outcome,) = read_rows(tmp_path / "run" / "outcomes.jsonl")
    assert outcome["ended"] == "interrupted"
    assert outcome["val_score"] is not None
    assert (tmp_path / "run" / "model.pt2").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("grow --task nothing", "no task 'nothing'; there are digits"),
        ("grow --controller wise", "no controller 'wise'"),
        ("grow --controller scripted:missing.txt", "no script 'missing.txt'"),
        ("grow --task mnist", "`esper data get mnist`"),
        ("grow --max-params 0.5", "below the host itself"),
        ("grow --incubation both", "'isolated' or 'joint'"),
        ("data get nothing", "unknown data set 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert esper_here(monkeypatch, *words.split(), cwd=tmp_path) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


@pytest.mark.parametrize("words", ["grow --steps 0", "grow --key -1", "grow --nonsense", "sprout"])
def test_bad_usage_is_exit_code_two(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert esper_here(monkeypatch, *words.split(), cwd=tmp_path) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten_by_accident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("grow", "--steps", "1", "--no-compare", "--out", "run")
    assert esper_here(monkeypatch, *common, cwd=tmp_path) == 0
    before = (tmp_path / "run" / "outcomes.jsonl").read_bytes()
    assert esper_here(monkeypatch, *common, "--key", "1", cwd=tmp_path) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "run" / "outcomes.jsonl").read_bytes() == before
    assert esper_here(monkeypatch, *common, "--key", "1", "--overwrite", cwd=tmp_path) == 0
    assert (tmp_path / "run" / "outcomes.jsonl").read_bytes() != before


def test_a_script_that_cannot_be_followed_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "plan.txt"
    script.write_text("1 GERMINATE r0c0 norm linear\n2 FOSSILIZE r0c0\n")
    words = ("grow", "--steps", "4", "--controller", "scripted:plan.txt")
    assert esper_here(monkeypatch, *words, cwd=tmp_path) == 2
    assert "line 2 of scripted:plan.txt is not legal at step 2" in capsys.readouterr().err


def test_paths_that_look_like_markup_are_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("grow", "--steps", "1", "--out", "x[/]y $a$")
    assert esper_here(monkeypatch, *common, cwd=tmp_path) == 0
    shown = capsys.readouterr().out
    for line in ("picture  x[/]y $a$/growth.png", "record   x[/]y $a$"):
        assert f"{line}\n" in shown
    assert esper_here(monkeypatch, "compare", "x[/]y $a$", cwd=tmp_path) == 0
    assert "x[/]y $a$ " in capsys.readouterr().out
    assert esper_here(monkeypatch, *common, cwd=tmp_path) == 2
    assert "x[/]y $a$ already holds a run" in capsys.readouterr().err
