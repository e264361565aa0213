"""`esper grow --then retrain`: what was found, trained anew, and what else the compute buys."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command_support import esper_here
from esper.growth import count_params
from esper.observatory import read_rows
from esper.proof import Found, Plan, retraining
from esper.proof.arms import host_size, training_macs
from esper.tolaria import Budget, Task, find_task, tasks
from helpers import small_digits

SCRIPT = "1 GERMINATE r0c0 widen_double linear\nauto FOSSILIZE\n"
WORDS = "grow --steps 14 --controller scripted:widen.txt --out run --key 8 --then retrain"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is given, with a task that is quick."""
    task, data = small_digits(128, 60)
    quick = replace(task, load=lambda root: data, widths=(2, 3, 4))
    monkeypatch.setattr(tasks, "find_task", lambda name: quick)
    monkeypatch.setattr(retraining, "RANDOM_SHAPES", 1)
    (tmp_path / "widen.txt").write_text(SCRIPT)
    return tmp_path


def summary(folder: Path) -> dict[str, Any]:
    return {row["arm"]: row for row in json.loads((folder / "run" / "summary.json").read_text())}


def test_the_found_shape_is_trained_anew_beside_others_with_the_compute_of_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert esper_here(monkeypatch, *WORDS.split(), "--max-params", "1200", cwd=folder) == 0
    shown = capsys.readouterr().out
    assert "found: blocks.0 2 -> 4 channels\n" in shown
    rows = summary(folder)
    assert list(rows) == ["host alone", "grown", "trained anew", "best uniform", "best random"]
    assert all(label in shown for label in (*rows, "spent in all"))
    anew, grown = rows["trained anew"], rows["grown"]
    assert (anew["params"], anew["seeds"]) == (grown["params"], []) == (590, [])
    both = grown["train_macs"] + anew["train_macs"]
    assert anew["bill_macs"] == both
    assert grown["bill_macs"] == grown["train_macs"]
    # Of the widths 2, 3 and 4 the last is above the cap; of random shapes only one was drawn.
    assert rows["best uniform"]["params"] in (496, 1009)
    assert both < rows["best uniform"]["bill_macs"] <= 2 * both
    assert rows["best random"]["bill_macs"] == rows["best random"]["train_macs"]
    for label in ("best uniform", "best random"):
        assert 0.9 * both < rows[label]["train_macs"] <= both
    arm = folder / "run" / "arms" / "trained-anew"
    (outcome,) = read_rows(arm / "outcomes.jsonl")
    assert (outcome["params"], outcome["steps"]) == (590, 14)
    program = torch.export.load(arm / "model.pt2").module()
    assert program(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert (folder / "run" / "report.html").is_file()


def test_without_comparison_only_the_found_shape_is_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert esper_here(monkeypatch, *WORDS.split(), "--no-compare", cwd=folder) == 0
    assert list(summary(folder)) == ["grown", "trained anew"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--then prune", "then must be retrain, or left out; got 'prune'"),
        ("--then retrain --start trained", "leave it out with --start trained"),
        ("--then retrain --max-params 200", "a budget of 200 parameters is below the host"),
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


# --- plans ---------------------------------------------------------------------------------------

MACS = 500_000_000


def found(task: Task, data: Any, budget: Budget, **what: Any) -> Found:
    return Found(task, data, budget, **({"widths": (4, 4, 8), "seeds": ()} | what))


def sizes(plans: list[Plan]) -> list[int]:
    return [count_params(plan.task.build()) for plan in plans]


def test_uniform_widths_keep_to_the_cap_or_to_what_was_found() -> None:
    task, data = small_digits()
    assert sizes(found(task, data, Budget(1200)).uniform(MACS)) == [163, 496, 1009]
    assert sizes(found(task, data, Budget()).uniform(MACS)) == [163, 496]
    assert sizes(found(task, data, Budget(macs=1.5)).uniform(MACS)) == [163, 496]
    shapes = found(task, data, Budget(596)).random(MACS)
    assert len(shapes) == retraining.RANDOM_SHAPES
    assert 531 <= min(sizes(shapes)) <= max(sizes(shapes)) <= 596


def test_controls_spend_all_that_they_may() -> None:
    task, data = small_digits()
    search = found(task, data, Budget(1200))
    for plan in search.uniform(MACS) + search.random(MACS):
        macs, steps = host_size(plan.task, data)[1], plan.rules.steps
        assert training_macs(plan.task, data, macs, steps) <= MACS
        assert training_macs(plan.task, data, macs, steps + 1) > MACS


def test_what_was_found_in_words() -> None:
    task, data = small_digits()
    names = task.recipe(data).catalogue
    seeds = ((1, names.index("branch")),)
    assert (
        found(task, data, Budget(), seeds=seeds).in_words()
        == "blocks.0 2 -> 4 channels; branch at blocks.1"
    )
    assert found(task, data, Budget(), widths=task.shape).in_words() == "the host as it was"


def test_a_task_without_shapes_trains_its_topology_anew() -> None:
    task = find_task("pydocs")
    data = task.load(Path("unused"))
    seeds = ((0, task.recipe(data).catalogue.index("widen_double")),)
    search = found(task, data, Budget(), widths=(), seeds=seeds)
    assert search.in_words() == f"widen_double at {task.slots[0]}"
    plan = search.anew(3)
    assert (plan.rules.topology, plan.rules.steps, plan.task) == (seeds, 3, task)
    assert search.random(MACS) == []
