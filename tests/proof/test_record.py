"""An evaluation that is stopped at any moment goes on, and ends with the same numbers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.leyline import ConfigError
from esper.proof import EvaluationSettings, evaluate
from esper.proof import evaluation as module
from esper.proof.arms import Plan, Run
from esper.proof.jobs import Job, LocalWorker, run_jobs
from esper.proof.record import RUNS, Record
from esper.proof.report import EvaluationReport
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tolaria.engine.run import GrowthSettings
from esper.tolaria.fused.choice import PopulationKind
from evaluation_support import Killed, make_arm, narrow_digits, numbers

SETTINGS = EvaluationSettings(("static", "grow"), keys=2, steps=4, tune=True)


def few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TUNING_KEYS", 2)
    monkeypatch.setattr(module, "RATE_FACTORS", (1.0, 3.0))


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    few_choices(monkeypatch)


def run(
    folder: Path | None, on_run: Callable[[str, Run], None] = lambda label, run: None
) -> EvaluationReport:
    return evaluate(*narrow_digits(), SETTINGS, make_arm, folder=folder, on_run=on_run)


def killed_at(number: int) -> Callable[[str, Run], None]:
    """As if the process had ended when it had just trained its `number`-th network."""
    seen: list[str] = []

    def on_run(label: str, run: Run) -> None:
        seen.append(label)
        if len(seen) == number:
            raise Killed

    return on_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluationReport]:
    """The folder and the report of an evaluation that nothing interrupted."""
    folder, labels = tmp_path_factory.mktemp("whole"), list[str]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        few_choices(monkeypatch)
        report = run(folder, lambda label, run: labels.append(f"{label} {run.outcome.key}"))
    assert len(set(labels)) == len(labels), "two ways of training have one label"
    return folder, report


def copied(finished: tuple[Path, EvaluationReport], folder: Path) -> EvaluationReport:
    shutil.copytree(finished[0], folder, dirs_exist_ok=True)
    return finished[1]


def test_killed_again_and_again_it_ends_with_the_same_numbers(
    tmp_path: Path, finished: tuple[Path, EvaluationReport]
) -> None:
    _, whole = finished
    deaths = 0
    while True:
        try:
            found = run(tmp_path, killed_at(7))
            break
        except Killed:
            deaths += 1
    assert deaths > 3
    assert numbers(found) == numbers(whole)
    # All runs are recorded: nothing is trained any more, and the numbers are the same.
    assert numbers(run(tmp_path, killed_at(1))) == numbers(whole)


@pytest.mark.parametrize("population", ["looped", "fused"])
def test_a_network_that_was_kept_is_the_same_bit_for_bit(
    tmp_path: Path, population: PopulationKind
) -> None:
    """Half blended in as well: what is kept has its alpha, and its valve."""
    task, data = narrow_digits()
    script = "1 GERMINATE r0c0 branch gated\n2 GERMINATE r0c1 conv_heavy linear\n"
    # Not the best network, which may have no seeds, but the last.
    rules = GrowthSettings(8, population=population, keep_best=False)
    plan = Plan(task, ScriptedController(script, "grow"), rules)
    job = Job("grow", plan, data, [0, 1], [{}, {}], attribute=True, keep=True)
    runs = [next(run_jobs([job], Record(tmp_path, {}), LocalWorker())) for _ in range(2)]
    assert any(seed.alpha not in (0.0, 1.0) for each in runs[0] for seed in each.outcome.seeds)
    for trained, kept in zip(*runs, strict=True):
        assert trained.model is not None
        assert kept.model is not None
        assert trained.outcome == kept.outcome
        assert trained.topology == kept.topology
        assert torch.equal(trained.model(data.test_x), kept.model(data.test_x))


def test_a_line_that_was_cut_off_is_trained_again(
    tmp_path: Path, finished: tuple[Path, EvaluationReport]
) -> None:
    whole = copied(finished, tmp_path)
    lines = tmp_path / "runs.jsonl"
    content = lines.read_bytes()
    lines.write_bytes(content[:-40])
    again: list[str] = []
    found = run(tmp_path, lambda label, run: again.append(label))
    assert again == [found.trials[-1].arm]
    assert numbers(found) == numbers(whole)
    assert all(json.loads(line) for line in lines.read_text().splitlines())


def test_the_population_is_chosen_once(
    tmp_path: Path, finished: tuple[Path, EvaluationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(finished, tmp_path)
    monkeypatch.setattr(module, "choose_population", lambda *args: "fused")
    assert run(tmp_path, killed_at(1)).population == "looped"


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, killed_at(1))
    other = replace(SETTINGS, keys=3)
    with pytest.raises(ConfigError, match="has keys 2, not 3"):
        evaluate(*narrow_digits(), other, make_arm, folder=tmp_path)


@pytest.mark.parametrize("content", [b"nonsense\n", b'{"other": 1}\n', b"[1]\n"])
def test_a_damaged_record_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(Killed):
        run(tmp_path, killed_at(1))
    (tmp_path / RUNS).write_bytes(content)
    with pytest.raises(ConfigError, match=r"runs\.jsonl is damaged"):
        run(tmp_path)
