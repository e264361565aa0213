"""When a host plateaus, when it has settled, and the best it ever did."""

import numpy as np
import pytest

from esper.leyline import TrainingSignals
from esper.tamiyo import SignalTracker


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
