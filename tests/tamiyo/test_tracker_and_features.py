from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.growth import BlueprintCatalogue, default_catalogue
from esper.leyline import TrainingSignals
from esper.tamiyo import (
    FeatureExtractionContext,
    SignalTracker,
    Situation,
    feature_size,
    make_controller,
    signals_to_features,
)
from esper.tolaria.trial import run_episode
from helpers import digits_env


def feed(tracker: SignalTracker, losses: list[float], scores: list[float]) -> TrainingSignals:
    for epoch, (loss, score) in enumerate(zip(losses, scores, strict=True)):
        row = (np.array([value]) for value in (0.0, 0.0, loss, score))
        signals = tracker.update(epoch, 10 * epoch, *row)
    return signals


def test_a_plateau_is_counted_from_the_best_so_far() -> None:
    tracker = SignalTracker(1)
    plateaus = [
        feed(tracker, [1.0], [score]).plateau_epochs[0]
        for score in [50.0, 60.0, 55.0, 60.4, 58.0, 60.5, 60.9, 61.0]
    ]
    assert plateaus == [0, 0, 1, 2, 3, 0, 1, 0]


def test_deltas_are_positive_when_better_and_absent_at_first() -> None:
    tracker = SignalTracker(1)
    first = feed(tracker, [2.0], [10.0])
    assert np.isnan(first.loss_delta[0])
    assert np.isnan(first.score_delta[0])
    second = feed(tracker, [1.5], [12.0])
    assert (second.loss_delta[0], second.score_delta[0]) == (0.5, 2.0)
    assert second.loss_history[0].tolist()[-2:] == [2.0, 1.5]
    assert np.isnan(second.loss_history[0, :3]).all()
    assert (second.best_val_loss[0], second.best_val_score[0]) == (1.5, 12.0)


@pytest.mark.parametrize(
    ("losses", "stable"),
    [
        ([1.0, 0.99, 0.98, 0.97], True),
        ([1.0, 0.99, 1.0, 0.99], True),
        ([1.0, 0.9, 0.8, 0.7], False),
        ([1.0, 0.99, 0.98], False),
        ([1.0, 0.99, 1.6, 1.6, 1.6], False),
        ([1.0, 0.99, 0.98, 0.97, 0.1], True),
        ([np.nan, 1.0, 1.0, 1.0], False),
    ],
)
def test_the_stabilisation_latch(losses: list[float], stable: bool) -> None:
    signals = feed(SignalTracker(1), losses, [50.0] * len(losses))
    assert signals.host_stabilized[0] == stable


def test_no_stabilisation_epochs_open_the_latch_at_once() -> None:
    signals = feed(SignalTracker(1, stabilization_epochs=0), [1.0], [1.0])
    assert signals.host_stabilized[0]


def test_reset_forgets_everything() -> None:
    tracker = SignalTracker(1)
    feed(tracker, [1.0] * 6, [50.0] * 6)
    tracker.reset()
    again = feed(tracker, [2.0], [10.0])
    assert not again.host_stabilized[0]
    assert again.plateau_epochs[0] == 0
    assert again.best_val_score[0] == 10.0


def test_widths_are_computed() -> None:
    assert feature_size(3, 5) == 80
    assert feature_size(3, 5, use_telemetry=False) == 50
    assert feature_size(3, 13) == 104
    assert feature_size(3, 13, use_telemetry=False) == 74


@pytest.fixture(scope="module")
def situations() -> list[Situation]:
    env = digits_env([1, 2], max_steps=14, on_panic="continue")
    seen: list[Situation] = []
    run_episode(
        env,
        make_controller("scripted:early"),
        on_step=lambda transition: seen.append(transition.after),
    )
    return seen


def test_layout_and_bounds(situations: list[Situation]) -> None:
    n_blueprints = len(default_catalogue())
    for s in situations:
        x = signals_to_features(FeatureExtractionContext(s))
        assert x.shape == (2, feature_size(3, n_blueprints))
        assert x.dtype == np.float32
        assert np.isfinite(x).all()
        assert np.abs(x).max() <= 2.0
        assert x[0, 0] == pytest.approx(s.step / s.max_steps)
        assert x[0, 6] == pytest.approx(s.signals.val_score[0] / 100)
        width = 4 + n_blueprints
        for slot in range(3):
            block = x[0, 23 + slot * width : 23 + (slot + 1) * width]
            assert block[0] == float(s.table.holds_seed[0, slot])
            assert block[1] == pytest.approx(s.table.stage[0, slot] / 10)
            assert block[2] == pytest.approx(s.table.alpha[0, slot])
            assert block[4:].sum() == float(s.table.blueprint[0, slot] >= 0)
        telemetry = x[0, 23 + 3 * width :].reshape(3, 10)
        assert (telemetry[~s.table.holds_seed[0]] == 0).all()
        assert telemetry[0, 8] == pytest.approx(s.table.alpha[0, 0])


def test_without_telemetry_the_rest_stays_where_it_is(situations: list[Situation]) -> None:
    whole = signals_to_features(FeatureExtractionContext(situations[-1]))
    part = signals_to_features(FeatureExtractionContext(situations[-1], use_telemetry=False))
    assert np.array_equal(whole[:, : part.shape[1]], part)


def test_five_blueprints_and_three_slots_make_eighty(situations: list[Situation]) -> None:
    five = BlueprintCatalogue(default_catalogue().specs[:5])
    x = signals_to_features(FeatureExtractionContext(replace(situations[0], catalogue=five)))
    assert x.shape == (2, 80)


@settings(max_examples=100, deadline=None)
@given(value=st.floats(allow_nan=True, allow_infinity=True, width=64))
def test_no_measurement_breaks_the_observation(situations: list[Situation], value: float) -> None:
    s = situations[-1]
    everything = {
        name: np.full_like(getattr(s.signals, name), value, dtype=np.float64)
        for name in (
            "train_loss",
            "val_loss",
            "loss_delta",
            "train_score",
            "val_score",
            "score_delta",
            "best_val_score",
            "best_val_loss",
            "loss_history",
            "score_history",
        )
    }
    table = s.table.copy()
    for column in (table.contribution, table.gradient_norm, table.gradient_health, table.score):
        column[:] = value
    odd = replace(s, signals=replace(s.signals, **everything), table=table)
    with np.errstate(all="ignore"):
        x = signals_to_features(FeatureExtractionContext(odd))
    assert np.isfinite(x).all()
    assert np.abs(x).max() <= 2.0
