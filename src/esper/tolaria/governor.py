"""The governor: watches the loss of every host and restores a broken one from its last snapshot.

It keeps one snapshot per host, taken only while the host is healthy. Each epoch the
loop calls `check`, restores the hosts that it finds broken, and saves the healthy ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.leyline import constants as c
from esper.leyline.events import GovernorPanic, GovernorRollback
from esper.tolaria.engine.event_log import absent
from esper.tolaria.engine.garden import SavedHost


@dataclass(frozen=True)
class Verdict:
    """For each environment: is the loss an anomaly, must the host be restored, and why."""

    panic: np.ndarray
    rollback: np.ndarray
    reasons: list[str]
    threshold: np.ndarray
    consecutive: np.ndarray


class Governor:
    """`random_guess_loss` is the loss of random guessing, if known. For hosts that arrive `trained`
    any first loss is accepted."""

    def __init__(
        self, n_envs: int, random_guess_loss: float | None = None, *, trained: bool = False
    ) -> None:
        self.random_guess_loss = random_guess_loss
        self.accepts_first_loss = np.full(n_envs, trained)
        self.saved: list[SavedHost | None] = [None] * n_envs
        self.history = np.full((n_envs, c.GOVERNOR_HISTORY_WINDOW), np.nan)
        self.last_score = np.full(n_envs, np.nan)
        self.panics = np.zeros(n_envs, dtype=np.int64)

    def check(
        self,
        val_loss: np.ndarray,
        val_score: np.ndarray,
        finite: np.ndarray,
        running: np.ndarray,
        on_trial: np.ndarray,
        noise: np.ndarray,
    ) -> Verdict:
        """Judge loss and score ([E]) of an epoch, and whether training stayed finite (bool[E]).
        Normal losses are added to the history.

        A loss that is not finite or has returned to that of guessing causes a rollback at once. A
        loss far above the history causes one only if it stays there for several epochs. Where a
        seed is `on_trial` (bool[E]: it affects the output but is not yet kept) one epoch is enough:
        a loss of several times the last healthy one, or a score that falls by more than a multiple
        of its `noise` ([E], NaN or 0 if unknown) while the loss does not fall.
        """
        known = np.sum(~np.isnan(self.history), axis=1)
        mean, deviation = _mean_and_deviation(self.history)
        not_finite = running & ~(np.isfinite(val_loss) & finite)
        guessing = running & self._guesses(val_loss, mean, known)
        threshold = self._threshold(mean, deviation, known)
        last = np.where(known > 0, self.history[:, -1], np.inf)
        threshold = np.where(
            on_trial, np.minimum(threshold, c.GOVERNOR_LOSS_MULTIPLIER * last), threshold
        )
        least = self.last_score - c.GOVERNOR_TRIAL_DROP * noise
        # After a shift of the data the score falls with or without a seed, but so does the loss.
        learning = (known > 0) & (val_loss < last)
        collapse = on_trial & (noise > 0) & (val_score < least) & ~learning
        explosion = running & ((val_loss > threshold) | collapse)

        panic = not_finite | guessing | explosion
        self.panics = np.where(panic, self.panics + 1, np.where(running, 0, self.panics))
        patience = np.where(on_trial, 1, c.GOVERNOR_MIN_PANICS_BEFORE_ROLLBACK)
        rollback = not_finite | guessing | (explosion & (self.panics >= patience))
        healthy = running & ~panic
        self.history[healthy, :-1] = self.history[healthy, 1:]
        self.history[healthy, -1] = val_loss[healthy]
        self.last_score[healthy] = val_score[healthy]
        reasons = np.select(
            [not_finite, guessing, collapse],
            ["loss_not_finite", "loss_of_a_guess", "score_collapse"],
            "loss_explosion",
        ).tolist()
        return Verdict(panic, rollback, reasons, threshold, self.panics.copy())

    def _guesses(self, loss: np.ndarray, mean: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Has a host that had learnt something returned to guessing?"""
        guess = self.random_guess_loss
        if guess is None:
            return np.zeros(len(loss), dtype=bool)
        return (
            (known >= c.GOVERNOR_MIN_HISTORY)
            & (mean < c.GOVERNOR_LOBOTOMY_MEAN * guess)
            & (np.abs(loss - guess) < c.GOVERNOR_LOBOTOMY_BAND * guess)
        )

    def _threshold(self, mean: np.ndarray, deviation: np.ndarray, known: np.ndarray) -> np.ndarray:
        """A loss above this is an anomaly.

        The first loss is compared with that of guessing; if that is not known, any finite loss may
        be normal for the task.
        """
        guess = np.inf if self.random_guess_loss is None else self.random_guess_loss
        usual = np.where(known > 0, mean, np.where(self.accepts_first_loss, np.inf, guess))
        statistical = np.where(
            known >= c.GOVERNOR_MIN_HISTORY, mean + c.GOVERNOR_SENSITIVITY * deviation, 0.0
        )
        relative = c.GOVERNOR_LOSS_MULTIPLIER * usual
        least = 0.0 if self.random_guess_loss is None else c.GOVERNOR_ABSOLUTE_THRESHOLD
        return np.maximum(least, np.maximum(statistical, relative))

    def save(self, env: int, host: SavedHost) -> None:
        """Replace the snapshot of an environment; the host must be healthy."""
        self.saved[env] = host

    def last_healthy(self, env: int) -> SavedHost:
        saved = self.saved[env]
        assert saved is not None, "a host is saved before its first epoch"
        return saved

    def forget_losses(self, env: int) -> None:
        """Forget the losses of a network whose output was scaled: the next ones have another
        scale."""
        self.history[env] = np.nan
        self.accepts_first_loss[env] = False

    def reset_panics(self, env: int) -> None:
        """Reset the count of panics, after a rollback."""
        self.panics[env] = 0


def _mean_and_deviation(history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the known values of each row; 0 where there are none."""
    present = ~np.isnan(history)
    count = np.maximum(present.sum(axis=1), 1)
    values = np.where(present, history, 0.0)
    mean = values.sum(axis=1) / count
    variance = (np.where(present, (values - mean[:, None]) ** 2, 0.0)).sum(axis=1) / count
    return mean, np.sqrt(variance)


def panic_event(env: int, step: int, verdict: Verdict, loss: float) -> GovernorPanic:
    return GovernorPanic(
        env,
        step,
        reason=verdict.reasons[env],
        loss=absent(loss),
        threshold=absent(verdict.threshold[env]),
        consecutive_panics=int(verdict.consecutive[env]),
    )


def rollback_event(
    env: int,
    step: int,
    verdict: Verdict,
    loss: float,
    restored: SavedHost,
    culprits: Sequence[tuple[str, str]],
) -> GovernorRollback:
    """`culprits` are (module, slot id) of the slots that are closed."""
    return GovernorRollback(
        env,
        step,
        reason=verdict.reasons[env],
        loss_at_panic=absent(loss),
        loss_threshold=absent(verdict.threshold[env]),
        consecutive_panics=int(verdict.consecutive[env]),
        restored_step=restored.step,
        culprit_modules=tuple(module for module, _ in culprits),
        culprit_slots=tuple(slot_id for _, slot_id in culprits),
    )
