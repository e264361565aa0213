"""Trackers get what the record has, and nothing else; read back with their own libraries."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
from command_support import esper_here
from esper.leyline import ConfigError, PackageMissingError
from esper.trackers import MLflow, TensorBoard, Tracker, WandB, find_tracker
from tracker_support import KINDS, Log, Points, read_back
from training_support import rows

pytestmark = pytest.mark.heavy
PLACES = ("step", "env", "round", "key")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The expected numbers of a row."""
    log = {}
    for column, value in row.items():
        if isinstance(value, int | float) and column not in PLACES:
            slot, dot, what = column.rpartition(".")
            log[f"{slot}/{what}" if dot else column] = float(value)
    return log


def points_of(found: list[tuple[dict[str, float], int]]) -> Points:
    points: Points = {}
    for values, step in found:
        for name, value in values.items():
            points.setdefault(name, {})[step] = value
    return points


def check_same(log: Points, wanted: Points) -> None:
    assert set(log) == set(wanted)
    for name, points in wanted.items():
        assert log[name] == pytest.approx(points, rel=1e-6), name  # TensorBoard has float32


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, esper.Grown]:
    """A run that was tracked by all trackers while it ran."""
    folder = tmp_path_factory.mktemp("tracked")
    torch.manual_seed(0)
    x = torch.randn(80, 6)
    data = [(x, (x[:, 0] * x[:, 1] > 0).long())]
    trackers = [esper.trackers.TRACKERS[kind](folder / kind, "grown") for kind in KINDS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        grown = esper.grow(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)),
            data,
            data,
            slots=["1"],
            steps=12,
            controller="scripted:early",
            out=folder / "run",
            callbacks=trackers,
            settings=esper.GrowthSettings(progress=False),
        )
    return folder, grown


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_has_what_the_history_has(kind: str, tracked: tuple[Path, esper.Grown]) -> None:
    folder, grown = tracked
    log = read_back(kind, folder / kind, "grown")
    wanted = [(numbers(row), row["step"]) for row in grown.history]
    outcome = {f"outcome/{k}": v for k, v in numbers(vars(grown.outcome)).items()}
    check_same(log.points, points_of([*wanted, (outcome, grown.outcome.steps)]))
    assert len(log.points["val_score"]) == 12
    assert max(log.points["1/alpha"].values()) > 0
    planted = [text for text in log.events if "planted, " in text]
    assert len(planted) == grown.outcome.germinated > 0


def test_the_command_tracks_every_arm_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = ("grow", "--steps", "1", "--track", "tensorboard", "--out", str(run))
    assert esper_here(monkeypatch, *words) == 0
    summary = {row["arm"]: row for row in json.loads((run / "summary.json").read_text())}
    assert set(summary) == {"grown", "host alone"}
    for arm, folder in (("grown", run), ("host alone", run / "arms" / "host-alone")):
        log = read_back("tensorboard", run / "tracked" / "tensorboard", arm.replace(" ", "-"))
        kept = rows(folder / "metrics.jsonl")
        assert log.points["val_loss"] == pytest.approx({r["step"]: r["val_loss"] for r in kept})
        assert log.points["outcome/test_score"] == pytest.approx({1: summary[arm]["test_score"]})
        assert log.config["arm"] == arm


def test_the_command_tracks_rounds_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    small = ("--envs", "1", "--steps", "1", "--rounds", "2", "--out", str(run))
    assert esper_here(monkeypatch, "train", "ppo", *small, "--track", "tensorboard") == 0
    # TensorBoard orders its files by the second in which they were begun.
    time.sleep(1.1)
    more = ("--resume", str(run), "--rounds", "3", "--track", "tensorboard")
    assert esper_here(monkeypatch, "train", "ppo", *more) == 0
    log = read_back("tensorboard", run / "tracked" / "tensorboard", "policy")
    rounds = [row for row in rows(run / "metrics.jsonl") if row["kind"] == "round"]
    assert len(rounds) == 3
    check_same(log.points, points_of([(numbers(row), row["round"]) for row in rounds]))


def test_a_run_that_goes_on_replaces_what_came_after(tmp_path: Path) -> None:
    for first, value in ((0, 1.0), (2, 5.0)):
        tracker = TensorBoard(tmp_path, "a")
        for step in range(first, 4):
            tracker.scalars({"x": value}, step)
        tracker.close()
        time.sleep(1.1)
    log = read_back("tensorboard", tmp_path, "a")
    assert log.points["x"] == {0: 1.0, 1: 1.0, 2: 5.0, 3: 5.0}


def test_nothing_is_opened_before_there_is_something_to_write(tmp_path: Path) -> None:
    for kind in KINDS:
        find_tracker(kind, tmp_path / kind, "x", {"key": 1}).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (TensorBoard, "tensorboard", "tensorboard"),
        (WandB, "wandb", "wandb"),
        (MLflow, "mlflow", "mlflow"),
    ],
)
def test_a_tracker_without_its_package_says_what_to_install(
    make: type[Tracker], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PackageMissingError, match=rf"pip install 'esper-grow\[{extra}\]'"):
        make("somewhere")


def test_a_strange_tracker_or_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tracker 'neptune'; there are tensorboard, wandb and"):
        find_tracker("neptune", Path(), "x", {})
    with pytest.raises(ConfigError, match="folder must be the path of a folder, got int"):
        TensorBoard(3)  # type: ignore[arg-type]


def test_the_reader_can_see_a_difference(tmp_path: Path) -> None:
    tracker = WandB(tmp_path, "b")
    tracker.scalars({"x": 2.0, "slot/y": 3.0}, 4)
    tracker.note("a seed was planted", 4)
    tracker.close()
    log = read_back("wandb", tmp_path, "b")
    assert log == Log({"x": {4: 2.0}, "slot/y": {4: 3.0}}, ["a seed was planted"], log.config)
