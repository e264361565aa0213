"""`esper grow --start trained`: a host, and every way to spend a little more on it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import esper.proof.arms
from command_support import esper_here
from esper.cli.arms import Arms
from esper.cli.printing import Output
from esper.leyline import ConfigError
from esper.observatory.run_directory import read_rows
from esper.proof.scenarios import RescuePlans
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.tasks import find_task


def test_every_way_is_shown_and_none_costs_more_than_the_extra_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "grow --start trained --extra 1.0 --steps 3 --controller scripted:early --out run"
    assert esper_here(monkeypatch, *words.split(), cwd=tmp_path) == 0
    shown = capsys.readouterr().out
    for label in ("trained host", "continue", "cooled", "grown", "best scratch"):
        assert label in shown
    rows = {row["arm"]: row for row in json.loads((tmp_path / "run" / "summary.json").read_text())}
    host = rows.pop("trained host")
    assert set(rows) == {"continue", "cooled", "grown", "best scratch"}
    for row in rows.values():
        assert 0 < row["train_macs"] <= host["train_macs"]
    (outcome,) = read_rows(tmp_path / "run" / "outcomes.jsonl")
    assert outcome["host_params"] == 496
    # The grown network begins with the host as it was at its end.
    (trained,) = read_rows(tmp_path / "run" / "arms" / "trained-host" / "outcomes.jsonl")
    first = next(iter(read_rows(tmp_path / "run" / "metrics.jsonl")))
    assert first["val_score"] == trained["val_score"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--start warm", "got 'warm'"),
        ("--start trained --extra 0", "extra must be a fraction"),
        ("--start trained --extra nan", "extra must be a fraction"),
        ("--start trained --extra 0.001", "does not pay for one epoch"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert esper_here(monkeypatch, "grow", *words.split(), "--out", "run", cwd=tmp_path) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_cap_and_the_incubation_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "grow --start trained --extra 1.0 --steps 3 --no-compare --out"
    largest, first_stage = {}, {}
    for name, more in {"free": "", "capped": "--max-params 1.1 --incubation isolated"}.items():
        assert esper_here(monkeypatch, *words.split(), name, *more.split(), cwd=tmp_path) == 0
        rows = list(read_rows(tmp_path / name / "metrics.jsonl"))
        largest[name] = max(row["params"] for row in rows)
        planted = next(row for row in rows if row["op"] == "GERMINATE")
        first_stage[name] = planted[f"{planted['slot']}.stage"]
    assert largest["capped"] <= 1.1 * 496 < largest["free"]
    assert first_stage == {"free": "BLENDING", "capped": "TRAINING"}


def test_the_least_budget_that_is_named_is_enough() -> None:
    task = find_task("digits")
    data = task.load(data_root())
    with pytest.raises(ConfigError, match="does not pay for one epoch") as refused:
        RescuePlans(task, data, 30, 0.001)
    least = float(str(refused.value).split(";")[1].split()[0])
    assert RescuePlans(task, data, 30, least + 0.001).budget > 0


@pytest.mark.parametrize(("scores", "best"), [([1.0, 3.0, 2.0], 1), ([None, -5.0], 1)])
def test_the_best_of_several_plans_has_the_best_validation_score(
    scores: list[float | None], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = iter(scores)

    def train(plan: object, data: object, keys: object) -> list[object]:
        return [SimpleNamespace(outcome=SimpleNamespace(val_score=next(trained)))]

    monkeypatch.setattr(esper.proof.arms, "train", train)
    arms: Any = SimpleNamespace(
        output=Output(quiet=True, as_json=False),
        settings=SimpleNamespace(key=0),
        data=None,
        _here=lambda plan: plan,
    )
    plans: list[Any] = [f"plan {i}" for i in range(len(scores))]
    assert Arms.best_of(arms, "best width", plans) == plans[best]
