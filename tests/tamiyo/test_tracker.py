"""When a host plateaus, when it has settled, and the best it ever did."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import TrainingSignals, generator
from esper.tamiyo.situation import SignalTracker, _quantile, score_noise


def feed(
    tracker: SignalTracker, losses: list[float], scores: list[float], chance: float = np.nan
) -> TrainingSignals:
    for epoch, (loss, score) in enumerate(zip(losses, scores, strict=True)):
        row = (np.array([value]) for value in (0.0, 0.0, loss, score))
        signals = tracker.update(epoch, 10 * epoch, *row, chance=np.array([chance]))
    return signals


def test_a_plateau_is_counted_from_the_best_so_far() -> None:
    tracker = SignalTracker(1)
    plateaus = [
        feed(tracker, [1.0], [score], chance=2.0).plateau_epochs[0]
        for score in [50.0, 55.0, 60.0, 60.4, 60.2, 60.6, 60.9, 61.2]
    ]
    assert plateaus == [0, 0, 0, 1, 2, 0, 1, 0]


scores_of_runs = st.lists(st.integers(0, 1000).map(float), min_size=3, max_size=30)


@settings(deadline=None)
@given(scores_of_runs, st.sampled_from([2.0**-7, 0.5, 8.0]), st.integers(-1000, 1000))
def test_noise_and_plateaus_know_no_scale(scores: list[float], scale: float, shift: int) -> None:
    """Exactly: powers of two and whole numbers lose nothing."""
    one, other = SignalTracker(1), SignalTracker(1)
    for score in scores:
        first = feed(one, [1.0], [score])
        second = feed(other, [1.0], [scale * (score + shift)])
        assert first.plateau_epochs == second.plateau_epochs
        assert np.array_equal(other.noise, scale * one.noise, equal_nan=True)


@pytest.mark.parametrize("deviation", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_the_noise_of_normal_numbers_is_their_deviation(deviation: float, slope: float) -> None:
    """Around a steady rise too; the estimate from ten scores is right in the median of many."""
    draws = np.random.default_rng(0).normal(0.0, deviation, (4000, 10))
    rising = draws + slope * deviation * np.arange(10)
    noise = score_noise(rising, np.full(4000, np.nan))
    assert np.median(noise) == pytest.approx(deviation, rel=0.1)


def test_the_noise_is_not_known_before_the_third_score_unless_chance_is() -> None:
    two = np.array([[np.nan, 50.0, 60.0]])
    assert np.isnan(score_noise(two, np.array([np.nan])))[0]
    assert score_noise(two, np.array([1.5]))[0] == 1.5
    three = np.array([[50.0, 51.0, 51.0]])
    assert score_noise(three, np.array([np.nan]))[0] == pytest.approx(1.0 / 1.6522)
    assert score_noise(three, np.array([4.0]))[0] == 4.0


def test_a_smooth_curve_still_plateaus() -> None:
    """The negative loss of a regression: each epoch gains, and in the end hardly anything."""
    for decay in (np.exp(-np.arange(40) / 5.0), 1.0 / np.arange(1, 41)):
        tracker = SignalTracker(1)
        plateaus = [int(feed(tracker, [1.0], [score]).plateau_epochs[0]) for score in -1e-4 * decay]
        assert sum(plateaus[:5]) == 0
        assert max(plateaus) >= 1


def test_a_score_that_never_moves_has_plateaued() -> None:
    tracker = SignalTracker(1)
    assert feed(tracker, [1.0] * 5, [0.3] * 5).plateau_epochs[0] == 3
    assert tracker.noise[0] == 0.0


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


def test_d28_no_stabilisation_epochs_open_the_gate_at_once() -> None:
    tracker = SignalTracker(2, stabilization_epochs=0)
    assert tracker.stabilized.all()
    assert feed(SignalTracker(1, stabilization_epochs=0), [1.0], [1.0]).host_stabilized[0]


def test_reset_forgets_everything() -> None:
    tracker = SignalTracker(1)
    feed(tracker, [1.0] * 6, [50.0] * 6)
    tracker.reset()
    again = feed(tracker, [2.0], [10.0])
    assert not again.host_stabilized[0]
    assert again.plateau_epochs[0] == 0
    assert again.best_val_score[0] == 10.0


def test_the_best_loss_and_the_best_score_are_those_of_the_whole_training() -> None:
    losses, scores = [1.0, 0.2, *[0.9] * 20], [50.0, 80.0, *[60.0] * 20]
    signals = feed(SignalTracker(1), losses, scores)
    assert (signals.best_val_loss[0], signals.best_val_score[0]) == (0.2, 80.0)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_quantiles_are_those_of_numpy(share: float) -> None:
    scores = generator(3, "scores").normal(size=(40, 9))
    scores[generator(3, "gaps").random(scores.shape) < 0.4] = np.nan
    scores[:, 0] = 1.0
    np.testing.assert_allclose(_quantile(scores, share), np.nanquantile(scores, share, axis=1))
