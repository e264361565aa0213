import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.tolaria.governor import Governor, Verdict

ONE = np.ones(1, dtype=bool)


def feed(governor: Governor, *losses: float, finite: bool = True) -> Verdict:
    for loss in losses:
        verdict = governor.check(np.array([loss]), np.array([finite]), ONE)
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
    governor = Governor(1)
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


def test_without_a_known_guess_nothing_can_be_forgotten() -> None:
    governor = Governor(1)
    feed(governor, *[1.0] * 12)
    assert not feed(governor, math.log(10)).panic[0]


def test_environments_are_judged_apart_and_only_while_they_run() -> None:
    governor = Governor(3)
    running = np.array([True, True, False])
    verdict = governor.check(np.array([np.nan, 1.0, np.nan]), np.ones(3, dtype=bool), running)
    assert verdict.rollback.tolist() == [True, False, False]
    governor.forgive(0)
    assert governor.panics.tolist() == [0, 0, 0]


@given(st.lists(st.floats(0.0, 11.0), min_size=1, max_size=60))
def test_ordinary_losses_never_panic(losses: list[float]) -> None:
    assert not feed(Governor(1), *losses).panic[0]
