import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline import LifecycleOp, SeedStage
from esper.leyline.constants import GOVERNOR_ABSOLUTE_THRESHOLD
from esper.tolaria.engine.population import Evaluation
from esper.tolaria.governor import Governor, Verdict
from helpers import digits_env

ONE = np.ones(1, dtype=bool)
NOISE = np.array([2.0])
GUESS = math.log(10)


def feed(
    governor: Governor,
    *losses: float,
    score: float = 50.0,
    finite: bool = True,
    on_trial: bool = False,
) -> Verdict:
    for loss in losses:
        verdict = governor.check(
            np.array([loss]),
            np.array([score]),
            np.array([finite]),
            ONE,
            np.array([on_trial]),
            NOISE,
        )
    return verdict


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_rolls_back_at_once(loss: float) -> None:
    verdict = feed(Governor(1), loss)
    assert verdict.rollback[0]
    assert verdict.reasons[0] == "loss_not_finite"
    assert verdict.consecutive[0] == 1


def test_training_that_is_not_finite_rolls_back_although_the_loss_looks_well() -> None:
    assert feed(Governor(1), 1.0, finite=False).rollback[0]


def test_two_explosions_then_calm_is_no_rollback_and_three_are() -> None:
    governor = Governor(1)
    feed(governor, *[1.0] * 12)
    verdict = feed(governor, 40.0, 40.0)
    assert verdict.panic[0]
    assert not verdict.rollback[0]
    assert not feed(governor, 1.0).panic[0]
    verdict = feed(governor, 40.0, 40.0, 40.0)
    assert verdict.rollback[0]
    assert verdict.reasons[0] == "loss_explosion"
    assert verdict.consecutive[0] == 3


def test_an_explosion_before_there_is_a_past_counts_too() -> None:
    assert feed(Governor(1, random_guess_loss=2.3), 50.0).panic[0]
    governor = Governor(1)
    feed(governor, 2.0)
    assert feed(governor, 12.1, 12.1, 12.1).rollback[0]


@pytest.mark.parametrize(("loss", "panics"), [(11.9, False), (12.1, True)])
def test_below_the_absolute_bound_nothing_is_an_explosion(loss: float, panics: bool) -> None:
    governor = Governor(1, random_guess_loss=GUESS)
    feed(governor, *[1.0] * 12)
    assert bool(feed(governor, loss).panic[0]) == panics


def test_a_task_with_large_losses_needs_more_than_the_absolute_bound() -> None:
    governor = Governor(1)
    feed(governor, *[100.0, 110.0] * 6)
    assert not feed(governor, 200.0).panic[0]
    assert feed(governor, 400.0).panic[0]


def test_anomalies_do_not_join_the_past() -> None:
    governor = Governor(1)
    feed(governor, *[1.0] * 12)
    for _ in range(30):
        assert feed(governor, 40.0).panic[0]


@pytest.mark.parametrize(
    ("past", "loss", "forgot"),
    [
        ([1.0] * 10, 2.30, True),
        ([1.0] * 9, 2.30, False),
        ([1.5] * 10, 2.30, False),
        ([1.0] * 10, 2.0, False),
    ],
)
def test_a_network_that_guesses_again_has_forgotten(
    past: list[float], loss: float, forgot: bool
) -> None:
    governor = Governor(1, random_guess_loss=math.log(10))
    feed(governor, *past)
    verdict = feed(governor, loss)
    assert verdict.rollback[0] == forgot
    if forgot:
        assert verdict.reasons[0] == "loss_of_a_guess"


def test_with_a_seed_on_trial_there_is_no_patience() -> None:
    governor = Governor(1)
    feed(governor, 1.0, 0.5)
    assert not feed(governor, 1.4).panic[0], "without a suspect this is noise"
    governor = Governor(1)
    feed(governor, 1.0, 0.5)
    assert not feed(governor, 1.4, on_trial=True).panic[0]
    assert feed(governor, 4.3, on_trial=True).rollback[0]
    assert governor.history[0, -1] == 1.4


def test_a_seed_on_trial_may_not_make_the_score_collapse() -> None:
    governor = Governor(1)
    feed(governor, 1.0, 1.0, score=70.0)
    assert not feed(governor, 1.2, score=59.0).panic[0], "without a suspect this is noise"
    feed(governor, 1.0, score=70.0)
    assert not feed(governor, 1.2, score=61.0, on_trial=True).panic[0]
    verdict = feed(governor, 1.2, score=50.0, on_trial=True)
    assert verdict.rollback[0]
    assert verdict.reasons[0] == "score_collapse"


def test_a_score_that_falls_with_the_loss_is_no_collapse() -> None:
    governor = Governor(1, trained=True)
    feed(governor, 5.2, score=70.0)
    assert not feed(governor, 2.0, score=50.0, on_trial=True).panic[0], "it learns what is new"
    assert feed(governor, 2.0, score=30.0, on_trial=True).rollback[0]
    governor.forget_losses(0)
    assert feed(governor, 1.9, score=30.0, on_trial=True).rollback[0], "on another scale"


@pytest.mark.parametrize(
    ("noise", "drop", "collapses"),
    [
        (6.0, 29.0, False),
        (6.0, 31.0, True),
        (0.01, 0.06, True),
        (0.0, 9.0, False),
        (np.nan, 9, False),
    ],
)
def test_how_far_a_score_may_fall_is_a_multiple_of_its_noise(
    noise: float, drop: float, collapses: bool
) -> None:
    governor = Governor(1)
    feed(governor, 1.0, score=70.0)
    one = np.array([1.0])
    verdict = governor.check(one, 70.0 - drop * one, ONE, ONE, ONE, noise * one)
    assert verdict.rollback[0] == collapses


def test_without_a_known_guess_nothing_can_be_forgotten() -> None:
    governor = Governor(1)
    feed(governor, *[1.0] * 12)
    assert not feed(governor, math.log(10)).panic[0]


def test_environments_are_judged_apart_and_only_while_they_run() -> None:
    governor = Governor(3)
    running = np.array([True, True, False])
    verdict = governor.check(
        np.array([np.nan, 1.0, np.nan]),
        np.zeros(3),
        np.ones(3, dtype=bool),
        running,
        running,
        np.full(3, 2.0),
    )
    assert verdict.rollback.tolist() == [True, False, False]
    governor.reset_panics(0)
    assert governor.panics.tolist() == [0, 0, 0]


@given(st.lists(st.floats(0.0, 11.0), min_size=1, max_size=60))
def test_ordinary_losses_never_panic(losses: list[float]) -> None:
    assert not feed(Governor(1, random_guess_loss=20.0), *losses).panic[0]


def test_a_loss_of_any_scale_can_explode() -> None:
    for scale in (1e-6, 1.0, 1e6):
        governor = Governor(1)
        feed(governor, *[1.0 * scale, 1.1 * scale] * 6)
        assert not feed(governor, 2.0 * scale).panic[0]
        assert feed(governor, 4.0 * scale).panic[0]


def test_d6_panics_are_counted_and_early_explosions_seen() -> None:
    governor = Governor(1, random_guess_loss=2.3)
    one = np.ones(1, dtype=bool)
    counts = []
    for _ in range(3):
        verdict = governor.check(np.array([40.0]), np.array([10.0]), one, one, ~one, NOISE)
        counts.append(int(verdict.consecutive[0]))
    assert counts == [1, 2, 3]
    assert verdict.rollback[0]


def test_deviations_count_from_the_tenth_loss_on() -> None:
    wild = [5.0, 15.0] * 5

    def panics(past: list[float], loss: float) -> bool:
        governor = Governor(1)
        feed(governor, *past)
        return bool(feed(governor, loss).panic[0])

    assert panics(wild[:9], 35.0), "more than three times the mean of about 9.4"
    assert not panics(wild, 35.0), "within six deviations of 5 around 10"
    assert panics(wild, 41.0)


@pytest.mark.parametrize(("loss", "rolls_back"), [(0.29, False), (0.31, True)])
def test_a_seed_on_trial_may_triple_the_last_loss_but_no_more(
    loss: float, rolls_back: bool
) -> None:
    """Also where the losses before were far higher, so that all other limits are."""
    governor = Governor(1, random_guess_loss=GUESS)
    feed(governor, 2.0, 1.0, 0.1)
    assert not feed(governor, 0.5).panic[0], "without a seed on trial this is no anomaly"
    feed(governor, 0.1)
    assert feed(governor, loss, on_trial=True).rollback[0] == rolls_back


@pytest.mark.parametrize(("factor", "rolls_back"), [(2.9, False), (3.1, True)])
def test_growth_with_a_seed_on_trial_rolls_back_when_the_loss_is_tripled(
    factor: float, rolls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = digits_env([1], max_steps=20, train=64, on_panic="continue")
    env.reset()
    branch = default_catalogue().index("branch")
    env.step(np.array([[0, branch, 0, LifecycleOp.GERMINATE]]))
    while env.table.stage[0, 0] != SeedStage.HOLDING:
        env.step(np.array([[0, 0, 0, LifecycleOp.WAIT]]))
    evaluate, loss = env.population.evaluate, factor * env.governor.history[0, -1]
    assert loss < GOVERNOR_ABSOLUTE_THRESHOLD, "only the seed on trial makes it an anomaly"

    def evaluate_once(envs: np.ndarray, present: np.ndarray) -> Evaluation:
        monkeypatch.undo()
        found = evaluate(envs, present)
        return replace(found, loss=np.full_like(found.loss, loss))

    monkeypatch.setattr(env.population, "evaluate", evaluate_once)
    transition = env.step(np.array([[0, 0, 0, LifecycleOp.WAIT]]))
    assert transition.rolled_back[0] == rolls_back
    assert (env.table.stage[0, 0] == SeedStage.CULLED) == rolls_back
