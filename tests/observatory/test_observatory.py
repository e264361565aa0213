import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from esper.leyline import ConfigError
from esper.leyline.events import GovernorRollback, SeedCulled
from esper.observatory import RunDirectory, StepProgress, draw_growth, read_rows, summary_table


def row(step: int, stage: str = "DORMANT", **changes: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "env": 0,
        "step": step,
        "op": "WAIT",
        "slot": None,
        "blueprint": None,
        "blend": None,
        "val_score": 50.0 + step,
        "r0c0.stage": stage,
        "r0c0.blueprint": None if stage == "DORMANT" else "conv_light",
        **changes,
    }


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", {"key": 1}) as run:
        run.metrics(row(0))
        assert len(list(read_rows(run.path / "metrics.jsonl"))) == 1
        run.event(GovernorRollback(0, 3, "loss_not_finite", None, 12.0, 1, 2, ("r0c0",)))
        (event,) = read_rows(run.path / "events.jsonl")
    assert event["event"] == "GovernorRollback"
    assert event["loss_at_panic"] is None
    assert event["culprit_slots"] == ["r0c0"]


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
    with (
        RunDirectory.create(tmp_path / "run", {}) as run,
        pytest.raises(ValueError, match="not JSON"),
    ):
        run.metrics({"value": float("nan")})


def test_actions_are_recorded_as_a_script(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", {}) as run:
        run.metrics(row(1, op="GERMINATE", slot="r0c0", blueprint="norm", blend="gated"))
        run.metrics(row(2))
        run.metrics(row(3, op="CULL", slot="r0c0"))
        run.metrics(row(3, op="CULL", slot="r0c1", env=1))
    script = (tmp_path / "run" / "actions.txt").read_text()
    assert script.split("\n") == ["1  GERMINATE  r0c0  norm  gated", "3  CULL  r0c0", ""]


def test_a_folder_with_a_run_or_without_permission_is_refused(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", {}).close()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDirectory.create(tmp_path / "run", {})
    RunDirectory.create(tmp_path / "run", {}, overwrite=True).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        RunDirectory.create(tmp_path / "file" / "run", {})


def test_a_picture_is_drawn_from_the_folder_alone(tmp_path: Path) -> None:
    for name, offset in (("run", 0.0), ("other", -3.0)):
        with RunDirectory.create(tmp_path / name, {}) as run:
            for step in range(12):
                stage = ("DORMANT", "TRAINING", "BLENDING", "FOSSILIZED")[step // 3]
                run.metrics(row(step, stage, val_score=60 + step + offset if step != 5 else None))
    picture = draw_growth(tmp_path / "run", "a title", {"host alone": tmp_path / "other"})
    assert picture.read_bytes().startswith(b"\x89PNG")
    RunDirectory.create(tmp_path / "empty", {}).close()
    with pytest.raises(ConfigError, match="no steps yet"):
        draw_growth(tmp_path / "empty", "nothing")


def test_the_terminal_shows_progress_and_the_comparison() -> None:
    console = Console(width=120, record=True, force_terminal=False)
    with StepProgress(console, "grown", 12) as progress:
        progress.show(row(3, "BLENDING"))
    rows = [
        {"arm": "grown", "test_score": 95.04, "params": 1138, "macs": 6736},
        {"arm": "host alone", "test_score": None, "params": 496, "macs": 3536},
    ]
    console.print(summary_table(rows, "accuracy"))
    text = console.export_text()
    assert "conv_light blending" in text
    assert "validation  53.0" in text
    assert "95.0" in text
    assert "1,138" in text


def test_automatic_culls_say_so() -> None:
    life: dict[str, Any] = {
        "env": 0,
        "step": 1,
        "slot_id": "r0c0",
        "blueprint": "norm",
        "epochs_total": 1,
        "epochs_in_stage": 1,
        "improvement": None,
        "counterfactual": None,
        "params": 5,
    }
    assert SeedCulled(**life, reason="holding_timeout").automatic
    assert not SeedCulled(**life, reason="controller").automatic
