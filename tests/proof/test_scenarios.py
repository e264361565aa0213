"""Trained hosts and a little more compute: every arm has the same budget and the same host."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from torch import nn

from esper.growth.blueprints.catalogue import count_params
from esper.growth.hosts import CNNHost
from esper.leyline import ConfigError
from esper.proof import EvaluationSettings, arms, evaluate
from esper.proof import evaluation as module
from esper.proof.arms import DO_NOTHING, Plan, Run
from esper.proof.compute import first_epoch_macs, host_size, paced, random_shapes, training_macs
from esper.proof.record import Record
from esper.proof.report import ArmResult, EvaluationReport, crossover
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.run import GrowthSettings, Trained
from esper.tolaria.tasks import find_task
from helpers import small_digits

STEPS = 9
EXTRA = (0.4, 1.0)
CONTROLS = ["continue", "continue-cooled", "grow", "found-scratch", "best-scratch", "random-shape"]
SCRIPT = "1 GERMINATE r0c0 branch linear\nauto FOSSILIZE\n"


@pytest.fixture(autouse=True)
def few_tuning_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TUNING_KEYS", 2)


def make_arm(name: str) -> Controller:
    return ScriptedController(SCRIPT, "grow") if name == "grow" else make_controller(name)


def settings(**what: Any) -> EvaluationSettings:
    return EvaluationSettings(
        **{"arms": ("grow",), "keys": 2, "steps": STEPS, "scenario": "trained", "extra": EXTRA}
        | what
    )


HALF = settings(extra=(0.5,), keys=1, tuning_keys=2)


@cache
def narrow_digits() -> tuple[Any, Any]:
    task, data = small_digits(160, 60)
    return replace(task, widths=(1, 2), batch=16), data


@cache
def report() -> EvaluationReport:
    return evaluate(*narrow_digits(), settings(), make_arm)


@pytest.fixture(scope="module")
def half() -> tuple[EvaluationReport, dict[str, GrowthSettings]]:
    """An evaluation with half the host's training as extra budget, and the rules by label."""
    rules: dict[str, GrowthSettings] = {}
    real = Record.read

    def noted(
        record: Record, label: str, data: Any, plans: dict[int, Plan]
    ) -> dict[int, Run] | None:
        rules[label] = next(iter(plans.values())).rules
        return real(record, label, data, plans)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Record, "read", noted)
        return evaluate(*narrow_digits(), HALF, make_arm), rules


def trials(found: EvaluationReport, label: str) -> list[ArmResult]:
    return [trial for trial in found.trials if trial.arm == label]


def cost() -> int:
    task, data = narrow_digits()
    return training_macs(task, data, host_size(task, data)[1], STEPS)


# --- budgets -------------------------------------------------------------------------------------


def test_every_budget_has_every_arm_and_every_key() -> None:
    labels = ["host", *(f"{name} +{extra:g}" for extra in EXTRA for name in CONTROLS)]
    assert [row["arm"] for row in report().arms] == labels
    assert all([trial.key for trial in trials(report(), label)] == [0, 1] for label in labels)


def test_a_host_costs_what_the_closed_form_says_and_others_no_more_than_their_share() -> None:
    assert {trial.train_macs for trial in trials(report(), "host")} == {cost()}
    for row in report().arms[1:]:
        for trial in trials(report(), row["arm"]):
            assert trial.train_macs <= row["extra"] * cost()


def test_networks_that_stay_as_they_are_use_their_budget_up() -> None:
    """All but an evaluation that is kept back, what one epoch more would cost to evaluate, and a
    batch of each epoch."""
    task, data = narrow_digits()
    for row in report().arms[1:]:
        if row["name"] == "grow":
            continue
        for trial in trials(report(), row["arm"]):
            epochs = trial.steps + ("scratch" in row["name"] or row["name"] == "random-shape")
            rest = row["extra"] * cost() - trial.train_macs
            passes = (epochs + 1) * 3 * task.batch + 2 * len(data.val_x) + epochs
            # Shorter epochs have fewer examples to look at before cooling.
            passes += len(data.train_x) if "cooled" in row["name"] else 0
            assert rest <= trial.macs * passes, row["arm"]


@given_settings(deadline=None)
@given(
    budget=st.integers(1_000, 100_000),
    macs=st.integers(1, 20),
    batches=st.none() | st.integers(1, 10),
    trained=st.booleans(),
)
def test_paced_epochs_are_paid_for_and_no_fewer_batches_than_whole_ones(
    budget: int, macs: int, batches: int | None, trained: bool
) -> None:
    task, data = narrow_digits()
    task = replace(task, batches_per_epoch=batches)
    if budget < first_epoch_macs(task, data, macs, trained=trained):
        return
    found, epochs = paced(task, data, macs, budget, trained=trained)

    def spent(batches: int | None, epochs: int) -> tuple[int, int]:
        """Examples trained on, and the bill."""
        seen = min(160, 16 * batches) if batches else 160
        return epochs * seen, macs * (epochs * (3 * seen + 60) + (2 + trained) * 60)

    own, bill = spent(found.batches_per_epoch, epochs)
    assert bill <= budget
    for whole in range(1, epochs + 2):
        other, other_bill = spent(batches, whole)
        assert other <= own or other_bill > budget
    shorter, many = paced(task, data, macs, budget, trained=trained, least=5)
    assert spent(shorter.batches_per_epoch, many)[1] <= budget
    if spent(1, 5)[1] <= budget:
        assert many >= 5


def test_a_budget_that_pays_for_no_epoch_is_refused_with_the_least_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arms, "train", lambda *args, **how: pytest.fail("something was trained"))
    with pytest.raises(ConfigError, match=r"0\.05 does not pay .*; 0\.1\d*"):
        evaluate(*narrow_digits(), settings(extra=(0.05, 1.0)), make_arm)


# --- hosts ---------------------------------------------------------------------------------------


def test_arms_begin_with_the_host_as_its_training_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate of 0 it stays what it was."""
    begun: list[tuple[Plan, list[int]]] = []
    real = arms.train

    def noted(plan: Plan, data: Any, keys: Any, *rest: Any, **how: Any) -> list[Trained]:
        if plan.rules.start == "trained":
            plan = replace(plan, task=replace(plan.task, learning_rate=0.0))
            begun.append((plan, list(keys)))
        return real(plan, data, keys, *rest, **how)

    monkeypatch.setattr(arms, "train", noted)
    monkeypatch.setitem(module.KEYS_AT_A_TIME, "looped", 2)
    found = evaluate(*narrow_digits(), settings(controls=False, extra=(0.4,)), make_arm)
    assert [keys for _, keys in begun] == [[0, 1]] * 2
    scores = [[t.test_score for t in trials(found, name)] for name in ("host", "continue +0.4")]
    assert scores[0] == scores[1]
    task, data = narrow_digits()
    rules = GrowthSettings(STEPS, counterfactuals="none", keep_best=False, schedule=task.schedule)
    for key in (0, 1):
        (alone,) = real(Plan(task, DO_NOTHING, rules), data, [key])
        for plan, _ in begun:
            assert plan.weights is not None
            for name, tensor in alone.model.state_dict().items():
                assert torch.equal(tensor, plan.weights[key][name])


def test_only_what_is_asked_for_is_cooled_and_all_have_one_schedule(
    half: tuple[EvaluationReport, dict[str, GrowthSettings]],
) -> None:
    _, rules = half
    budgeted = {label: each for label, each in rules.items() if each.max_train_macs is not None}
    assert {each.rates for each in budgeted.values()} == {
        each.rates for each in budgeted.values() if each.rates is not None
    }
    assert len({each.rates for each in budgeted.values()}) == 1
    cooled = {label for label, each in budgeted.items() if each.cools}
    assert cooled == {label for label in budgeted if "continue-cooled" in label or "grow" in label}
    assert {label for label, each in budgeted.items() if each.start == "trained"} == {
        label for label in budgeted if "continue" in label or "grow" in label
    }


# --- controls and comparisons --------------------------------------------------------------------


def test_found_scratch_is_what_was_grown() -> None:
    every = [trial for extra in EXTRA for trial in trials(report(), f"grow +{extra:g}")]
    assert any(trial.kept for trial in every), "nothing was grown; the test shows nothing"
    for extra in EXTRA:
        pairs = [trials(report(), f"{name} +{extra:g}") for name in ("grow", "found-scratch")]
        for grown, scratch in zip(*pairs, strict=True):
            assert (grown.kept, grown.macs) == (scratch.kept, scratch.macs)


def test_the_reference_is_compared_with_every_control_of_its_own_budget() -> None:
    pairs = [(row.arm, row.versus) for row in report().comparisons]
    controls = [name for name in CONTROLS if name != "grow"]
    assert pairs == [(f"grow +{e:g}", f"{name} +{e:g}") for e in EXTRA for name in controls]


def test_without_controls_growing_is_compared_with_going_on() -> None:
    found = evaluate(*narrow_digits(), settings(controls=False, extra=(0.5,), keys=1), make_arm)
    assert [row["arm"] for row in found.arms] == ["host", "continue +0.5", "grow +0.5"]
    assert [(row.arm, row.versus) for row in found.comparisons] == [("grow +0.5", "continue +0.5")]
    assert found.crossover is None


def test_a_killed_scenario_goes_on_with_the_same_numbers(
    tmp_path: Path, half: tuple[EvaluationReport, dict[str, GrowthSettings]]
) -> None:
    def killed_at(number: int) -> Callable[[str, Run], None]:
        labels: list[str] = []

        def on_run(label: str, run: Run) -> None:
            labels.append(label)
            if len(labels) == number:
                raise RuntimeError(label)

        return on_run

    killed = []
    for death in (3, 9, 3):
        with pytest.raises(RuntimeError) as error:
            evaluate(*narrow_digits(), HALF, make_arm, folder=tmp_path, on_run=killed_at(death))
        killed.append(str(error.value))
    assert "tuning" in killed[0]
    assert "tuning" not in killed[-1]
    found = evaluate(*narrow_digits(), HALF, make_arm, folder=tmp_path)
    for one, other in zip(found.trials, half[0].trials, strict=True):
        assert replace(one, cpu_seconds=0.0) == replace(other, cpu_seconds=0.0)
    assert found.crossover == half[0].crossover


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [400, 900, 5000])
def test_random_shapes_are_uneven_and_of_the_size_that_is_asked_for(params: int) -> None:
    task = find_task("digits")
    assert task.host_of_widths is not None
    shapes = random_shapes(task.host_of_widths, task.shape, params, 6)
    assert len(set(shapes)) == 6
    for shape in shapes:
        host: nn.Module = CNNHost(in_channels=1, widths=shape)
        assert abs(count_params(host) / params - 1.0) <= 0.1
        assert shape[1] != 2 * shape[0] or shape[2] != 4 * shape[0]
    assert shapes == random_shapes(task.host_of_widths, task.shape, params, 6)


# --- the crossover -------------------------------------------------------------------------------


def rows(scores: dict[str, float]) -> list[dict[str, Any]]:
    return [{"arm": name, "test_score": score} for name, score in scores.items()]


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ((1.0, 0.5, 0.1), "is ahead at extra budgets 0.1 and 0.3 and 1 ("),
        ((-1.0, -0.5, 0.0), "is ahead at no extra budget ("),
        ((1.0, -0.5, 0.5), "is ahead at extra budgets 0.1 and 1 ("),
    ],
)
def test_the_crossover_is_one_sentence(differences: tuple[float, ...], words: str) -> None:
    extras = (0.1, 0.3, 1.0)
    scores = {}
    for extra, difference in zip(extras, differences, strict=True):
        scores |= {f"grow +{extra:g}": 90.0 + difference, f"best-scratch +{extra:g}": 90.0}
        scores |= {f"continue-cooled +{extra:g}": 88.0, f"continue +{extra:g}": 99.0}
    sentence = crossover(rows(scores), "grow", extras)
    assert sentence is not None
    assert sentence.startswith(f"grow {words}")
    assert f"better of continue-cooled and best-scratch: {differences[0]:+.2f} at 0.1" in sentence
    assert crossover(rows(scores), None, extras) is None
    assert crossover(rows(scores), "grow", ()) is None
