"""Evaluation: paired keys, controls, and test data that are read only at the end."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline import ConfigError, EpisodeOutcome
from esper.proof import EvaluationSettings, arms, evaluate, jobs
from esper.proof import evaluation as module
from esper.proof.arms import Plan, Run, WorkItem, WorkResults, resolve, static_plan, train
from esper.proof.compute import affordable_steps, host_size, of_width, training_macs
from esper.proof.report import EvaluationReport
from esper.proof.scenarios import _best_static, widths_up_to
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.situation import Controller, Situation, wait
from esper.tolaria.engine.run import GrowthSettings, Trained
from esper.tolaria.tasks import Task
from helpers import small_digits

STEPS = 12


@pytest.fixture(autouse=True)
def few_tuning_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two show the same as eight, sooner."""
    monkeypatch.setattr(module, "TUNING_KEYS", 2)


SCRIPT = "1 GERMINATE r0c0 branch linear\nauto FOSSILIZE\n"


def make_arm(name: str) -> Controller:
    return ScriptedController(SCRIPT, "grow") if name == "grow" else make_controller(name)


SETTINGS = EvaluationSettings(("static", "random", "grow"), keys=2, steps=STEPS, tuning_keys=1)


def narrow_digits() -> tuple[Any, Any]:
    """Little data, and only two widths to choose from."""
    task, data = small_digits(128)
    return replace(task, widths=(2, 3), batch=64), data


class Rows:
    """A recorder that keeps the metrics rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def event(self, event: object) -> None: ...

    def metrics(self, row: Any) -> None:
        self.rows.append(dict(row))

    def outcome(self, outcome: EpisodeOutcome) -> None: ...


def outcome_of(plan: Plan, data: Any) -> EpisodeOutcome:
    return train(plan, data, [0])[0].outcome


@cache
def grown(key: int = 0) -> Trained:
    task, data = narrow_digits()
    (trained,) = train(Plan(task, make_arm("grow"), GrowthSettings(STEPS)), data, [key])
    return trained


def grown_run() -> Run:
    return Run(grown().outcome, grown().topology, 0.0, None)


@cache
def report() -> EvaluationReport:
    return evaluate(*narrow_digits(), SETTINGS, make_arm)


def arm(found: EvaluationReport, name: str) -> dict[str, Any]:
    return next(row for row in found.arms if row["arm"] == name)


def trials(found: EvaluationReport, name: str) -> list[Any]:
    return [trial for trial in found.trials if trial.arm == name]


# --- pairs ---------------------------------------------------------------------------------------


def test_arms_of_one_key_share_host_and_shuffles() -> None:
    task, data = narrow_digits()
    first_epochs, last_scores = [], []
    for name in ("static", "random", "heuristic", "grow"):
        watcher = Rows()
        train(Plan(task, make_arm(name), GrowthSettings(6)), data, [5], watcher)
        first_epochs.append([watcher.rows[0][k] for k in ("val_score", "val_loss", "train_loss")])
        last_scores.append(watcher.rows[-1]["val_loss"])
    assert all(scores == first_epochs[0] for scores in first_epochs)
    assert len(set(last_scores)) > 1, "the arms never parted; the test shows nothing"


def test_other_keys_are_other_hosts() -> None:
    task, data = narrow_digits()
    losses = set()
    for key in (0, 1):
        watcher = Rows()
        train(Plan(task, make_arm("static"), GrowthSettings(1)), data, [key], watcher)
        losses.add(watcher.rows[0]["val_loss"])
    assert len(losses) == 2


def test_every_arm_has_every_key() -> None:
    found = report()
    assert found.keys == (0, 1)
    for row in found.arms:
        assert [trial.key for trial in trials(found, row["arm"])] == [0, 1]


def test_the_same_evaluation_gives_the_same_numbers() -> None:
    settings = EvaluationSettings(("static", "grow"), keys=1, steps=4, controls=False)
    one, two = (evaluate(*narrow_digits(), settings, make_arm) for _ in range(2))
    for a, b in zip(one.trials, two.trials, strict=True):
        assert replace(a, cpu_seconds=0.0) == replace(b, cpu_seconds=0.0)


def test_keys_trained_together_give_the_numbers_of_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With keys whose plans differ: their controls have other topologies or other steps."""
    settings = EvaluationSettings(("static", "heuristic"), keys=2, steps=12, tuning_keys=1)
    task, data = narrow_digits()
    task = replace(task, widths=())
    found, trained_together = [], []
    real = arms.train

    def noted(plan: Plan, data: Any, keys: Sequence[int], *rest: Any, **how: Any) -> list[Trained]:
        trained_together.append(len(keys))
        return real(plan, data, keys, *rest, **how)

    monkeypatch.setattr(arms, "train", noted)
    for side_by_side in (1, 2):
        monkeypatch.setitem(module.KEYS_AT_A_TIME, "looped", side_by_side)
        report = evaluate(task, data, settings, make_arm)
        found.append([replace(trial, cpu_seconds=0.0) for trial in report.trials])
    assert max(trained_together) == 2
    assert found[0] == found[1]
    assert len({(trial.kept, trial.steps) for trial in found[0] if "static-final" in trial.arm}) > 1


# --- the test part -------------------------------------------------------------------------------


def test_no_choice_depends_on_the_test_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATE_FACTORS", (1.0, 3.0))
    settings = EvaluationSettings(("static", "grow"), keys=1, steps=3, tune=True, tuning_keys=1)
    task, data = narrow_digits()
    other = replace(data, test_x=torch.zeros_like(data.test_x))
    seen, blind = (evaluate(task, each, settings, make_arm) for each in (data, other))
    for a, b in zip(seen.trials, blind.trials, strict=True):
        assert a.test_score != b.test_score
        assert replace(a, test_score=0.0, cpu_seconds=0.0) == replace(
            b, test_score=0.0, cpu_seconds=0.0
        )


def test_the_test_part_is_read_after_all_training_and_once_per_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story: list[str] = []
    real_train, real_score = arms.train, Task.score_on

    def noted_train(
        plan: Plan, data: Any, keys: Sequence[int], *rest: Any, **how: Any
    ) -> list[Trained]:
        story.extend(["train"] * len(keys))
        return real_train(plan, data, keys, *rest, **how)

    def noted_score(*args: Any) -> float:
        story.append("test")
        return real_score(*args)

    monkeypatch.setattr(arms, "train", noted_train)
    monkeypatch.setattr(Task, "score_on", noted_score)
    settings = EvaluationSettings(("static", "random"), keys=2, steps=2, controls=False)
    evaluate(*narrow_digits(), settings, make_arm)
    assert story == ["train"] * 4 + ["test"] * 4


# --- costs and controls --------------------------------------------------------------------------


def test_the_grown_arm_grew() -> None:
    """Otherwise the tests of controls below would compare the host with itself."""
    assert grown().topology
    assert grown().outcome.params > grown().outcome.host_params


@pytest.mark.parametrize("steps", [1, 5])
def test_training_compute_in_closed_form_is_what_a_static_run_is_charged(steps: int) -> None:
    task, data = narrow_digits()
    static = outcome_of(static_plan(task, steps), data)
    assert training_macs(task, data, static.macs, steps) == static.train_macs
    plan = replace(static_plan(task, steps), topology_from="grow")
    final = outcome_of(resolve(plan, data, {"grow": grown_run()}), data)
    assert training_macs(task, data, final.macs, steps) == final.train_macs


def test_short_epochs_are_charged_for_what_they_see() -> None:
    task, data = narrow_digits()
    task = replace(task, batches_per_epoch=2)
    static = outcome_of(static_plan(task, 3), data)
    assert training_macs(task, data, static.macs, 3) == static.train_macs


def test_affordable_steps_use_the_budget_up() -> None:
    task, data = narrow_digits()
    for budget_steps in (1, 7, 40):
        budget = training_macs(task, data, 1000, budget_steps)
        assert affordable_steps(task, data, 1000, budget) == budget_steps
        assert affordable_steps(task, data, 1000, budget - 1) == max(1, budget_steps - 1)


def test_growing_costs_more_than_the_network_it_ends_with() -> None:
    """Rejected keys and counterfactual passes are in the bill of the arm that made them."""
    task, data = narrow_digits()
    rejected = ScriptedController("1 GERMINATE r0c0 branch linear\n3 CULL r0c0\n", "cull")
    outcome = outcome_of(Plan(task, rejected, GrowthSettings(6)), data)
    assert outcome.params == outcome.host_params
    assert outcome.train_macs > training_macs(task, data, outcome.host_macs, 6)


def test_static_final_is_the_found_network_with_the_same_epochs() -> None:
    found = report()
    for grown_trial, final in zip(
        trials(found, "grow"), trials(found, "static-final"), strict=True
    ):
        assert final.params == grown_trial.params
        assert final.macs == grown_trial.macs
        assert final.kept == grown_trial.kept
        assert final.steps == grown_trial.steps == STEPS
        assert final.germinated == final.fossilized == 0


def test_equal_compute_controls_spend_what_the_reference_spent() -> None:
    found = report()
    task, data = narrow_digits()
    for name in ("static-final-equal-compute", "best-static-equal-compute"):
        for own, reference in zip(trials(found, name), trials(found, "grow"), strict=True):
            one_more = training_macs(task, data, own.macs, own.steps + 1)
            assert own.train_macs <= reference.train_macs < one_more


def test_equal_compute_is_that_of_the_run_that_spent_least() -> None:
    """A width that only the dearer run of the reference could pay for is no candidate."""
    task, data = narrow_digits()
    widths = {width: of_width(task, width) for width in (2, 3)}
    costs = [training_macs(task, data, host_size(widths[w], data)[1], steps=1) for w in (2, 3)]
    bench = SimpleNamespace(
        widths=widths,
        data=data,
        task=task,
        steps=STEPS,
        population="looped",
        candidates=lambda name, plan, width: [(name, width)],
    )

    def spent(macs: int) -> Any:
        return SimpleNamespace(outcome=SimpleNamespace(train_macs=macs, params=500))

    for budgets, expected in (((costs[0], costs[1]), [2]), ((costs[1], costs[1]), [2, 3])):
        _, equal = _best_static(bench, "grow", [spent(macs) for macs in budgets])
        assert [width for _, width in equal] == expected


def test_best_static_equal_params_is_about_as_large_and_trained_as_long() -> None:
    found = report()
    task, data = narrow_digits()
    row = arm(found, "best-static-equal-params")
    assert row["params"] == host_size(of_width(task, row["width"]), data)[0]
    assert row["steps"] == STEPS
    assert row["params"] <= 1.1 * arm(found, "grow")["params"]


def test_widths_up_to_takes_the_nearest_in_proportion() -> None:
    sizes = {1: (163, 0), 2: (496, 0), 3: (1009, 0), 4: (1702, 0)}
    assert widths_up_to(sizes, 986) == [1, 2, 3]
    assert widths_up_to(sizes, 496) == [1, 2]
    assert widths_up_to(sizes, 10) == [1]


def test_a_task_without_a_family_has_no_best_static() -> None:
    task, data = narrow_digits()
    task = replace(task, widths=())
    settings = EvaluationSettings(("static", "grow"), keys=1, steps=STEPS)
    found = evaluate(task, data, settings, make_arm)
    assert [row["arm"] for row in found.arms] == [
        "static",
        "grow",
        "static-final",
        "static-final-equal-compute",
    ]


def test_controls_are_made_for_the_arm_that_is_asked_for() -> None:
    settings = EvaluationSettings(("static", "grow", "random"), keys=1, control_for="grow")
    assert settings.reference == "grow"
    assert replace(settings, control_for=None).reference == "random"
    assert replace(settings, controls=False).reference is None
    assert EvaluationSettings(("static",)).reference is None


# --- tuning --------------------------------------------------------------------------------------


def test_every_arm_tunes_on_the_same_grid_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: dict[str, list[tuple[float, int]]] = {}
    real = jobs.train_item

    def noted(item: WorkItem) -> WorkResults:
        arm = f"{item.plan.controller.name} {bool(item.plan.rules.topology)}"
        rate = item.plan.task.learning_rate
        tried.setdefault(arm, []).extend((rate, key) for key in item.keys)
        return real(item)

    monkeypatch.setattr(jobs, "train_item", noted)
    settings = EvaluationSettings(("static", "grow"), keys=1, steps=2, tune=True, controls=False)
    found = evaluate(*narrow_digits(), settings, make_arm)
    tried = {arm: [each for each in of if each[1] != 0] for arm, of in tried.items()}
    assert tried["static False"] == tried["scripted:grow False"]
    assert {key for _, key in tried["static False"]} == set(found.tuning_keys)
    assert not set(found.tuning_keys) & set(found.keys)
    assert {rate for rate, _ in tried["static False"]} == set(found.learning_rates)
    assert len(found.learning_rates) == 3


def test_tuning_takes_the_rate_that_is_best_on_validation() -> None:
    """In so few steps the largest rate of this grid, which is its last, gets furthest."""
    task, data = narrow_digits()
    task = replace(task, learning_rate=1e-3)
    settings = EvaluationSettings(("static",), keys=1, steps=8, tune=True)
    found = evaluate(task, data, settings, make_arm)
    assert arm(found, "static")["learning_rate"] == max(found.learning_rates)


def test_without_tuning_every_arm_uses_the_rate_of_the_task() -> None:
    found = report()
    assert {row["learning_rate"] for row in found.arms} == {0.01}
    assert found.learning_rates == (0.01,)


# --- report --------------------------------------------------------------------------------------


def test_comparisons_are_those_of_the_trials() -> None:
    found = report()
    scores = {row["arm"]: [t.test_score for t in trials(found, row["arm"])] for row in found.arms}
    pairs = [(c.arm, c.versus) for c in found.comparisons]
    assert pairs[:2] == [("random", "static"), ("grow", "static")]
    assert {versus for name, versus in pairs[2:]} == {
        "static-final",
        "static-final-equal-compute",
        "best-static-equal-params",
        "best-static-equal-compute",
    }
    for c in found.comparisons:
        expected = np.mean(np.subtract(scores[c.arm], scores[c.versus]))
        assert c.mean == pytest.approx(expected)
        assert c.p_holm is not None
        assert c.p is not None
        assert c.p_holm >= c.p


def test_the_report_is_plain_json() -> None:
    assert json.loads(json.dumps(report().as_dict(), allow_nan=False))["task"] == "digits"


def test_one_key_gives_no_intervals_and_no_nan() -> None:
    settings = EvaluationSettings(("static", "random"), keys=1, steps=2, controls=False)
    found = evaluate(*narrow_digits(), settings, make_arm)
    (only,) = found.comparisons
    assert (only.low, only.high, only.p, only.p_holm) == (None, None, None, None)
    json.dumps(found.as_dict(), allow_nan=False)


# --- what can go wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arms": ()}, "at least one arm"),
        ({"arms": ("static", "static")}, "more than once"),
        ({"arms": ("static",), "keys": 0}, "keys must"),
        ({"arms": ("static",), "steps": 0}, "steps must"),
        ({"arms": ("static",), "control_for": "random"}, "control_for must"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvaluationSettings(**settings)


class Misfit:
    name = "misfit"

    def reset(self, n_envs: int) -> None: ...

    def act(self, situation: Situation) -> np.ndarray:
        raise ConfigError("this policy is for five slots, the task has three")


def test_a_policy_that_does_not_fit_is_found_before_any_trial() -> None:
    phases: list[str] = []
    settings = EvaluationSettings(("static", "misfit"), keys=1, steps=2)
    with pytest.raises(ConfigError, match="five slots"):
        evaluate(
            *narrow_digits(),
            settings,
            lambda name: Misfit() if name == "misfit" else make_arm(name),
            lambda *args: phases.append(args[0]),
        )
    assert phases == []


class Interrupting:
    """Ctrl-C at its n-th decision."""

    name = "interrupting"

    def __init__(self, at: int) -> None:
        self.at, self.decisions = at, 0

    def reset(self, n_envs: int) -> None: ...

    def act(self, situation: Situation) -> np.ndarray:
        self.decisions += 1
        if self.decisions == self.at:
            raise KeyboardInterrupt
        return wait(situation.n_envs)


def test_ctrl_c_reports_the_keys_that_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.KEYS_AT_A_TIME, "looped", 2)
    settings = EvaluationSettings(
        ("static", "late"), keys=5, steps=2, controls=False, growth=GrowthSettings()
    )
    controller = Interrupting(at=1 + 2 + 1)  # the rehearsal, two keys of two steps, then
    found = evaluate(
        *narrow_digits(),
        settings,
        lambda name: controller if name == "late" else make_arm(name),
    )
    assert found.keys == (0, 1)
    assert found.keys_wanted == 5
    assert len(found.trials) == 4


def test_ctrl_c_in_the_first_keys_leaves_nothing_to_report() -> None:
    settings = EvaluationSettings(("late",), keys=2, steps=2, controls=False)
    with pytest.raises(KeyboardInterrupt):
        evaluate(*narrow_digits(), settings, lambda name: Interrupting(at=2))
