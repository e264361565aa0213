"""The governor: watches every host's loss and brings a broken one back to when it was healthy.

One snapshot per host, in CPU memory, taken only of a healthy host. The loop asks `check` first; a
host it finds broken is restored, any other one may be snapshot afterwards.
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
    """`random_guess_loss` is what a network that has forgotten everything would score, if known.
    Of hosts that arrive `trained` the first loss is the scale of the task, however high it is."""

    def __init__(
        self, n_envs: int, random_guess_loss: float | None = None, *, trained: bool = False
    ) -> None:
        self.random_guess_loss = random_guess_loss
        self.trusts = np.full(n_envs, trained)  # the next loss, if it is the first
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

        Normal losses join the history, others do not.

        A loss that is not finite, or has fallen back to guessing, calls for a rollback at once; a
        loss far above the past only when it stays there. Where a seed is `on_trial` (bool[E]: it
        acts on the output and is not yet a fossil) there is a suspect, and no patience: a loss of
        several times the last healthy one, or a score far below it without a lower loss, is enough.
        How far is beyond chance is a multiple of the score's `noise` ([E]); nothing is where that
        is not known.
        """
        known = np.sum(~np.isnan(self.history), axis=1)
        mean, deviation = _mean_and_deviation(self.history)
        not_finite = running & ~(np.isfinite(val_loss) & finite)
        lobotomy = running & self._forgot(val_loss, mean, known)
        threshold = self._threshold(mean, deviation, known)
        last = np.where(known > 0, self.history[:, -1], np.inf)
        threshold = np.where(
            on_trial, np.minimum(threshold, c.GOVERNOR_LOSS_MULTIPLIER * last), threshold
        )
        least = self.last_score - c.GOVERNOR_TRIAL_DROP * noise
        # Data that have shifted cost points at first, seed or no seed; but then the loss falls.
        learning = (known > 0) & (val_loss < last)
        collapse = on_trial & (noise > 0) & (val_score < least) & ~learning
        explosion = running & ((val_loss > threshold) | collapse)

        panic = not_finite | lobotomy | explosion
        self.panics = np.where(panic, self.panics + 1, np.where(running, 0, self.panics))
        patience = np.where(on_trial, 1, c.GOVERNOR_MIN_PANICS_BEFORE_ROLLBACK)
        rollback = not_finite | lobotomy | (explosion & (self.panics >= patience))
        healthy = running & ~panic
        self.history[healthy, :-1] = self.history[healthy, 1:]
        self.history[healthy, -1] = val_loss[healthy]
        self.last_score[healthy] = val_score[healthy]
        reasons = [_reason(*signs) for signs in zip(not_finite, lobotomy, collapse, strict=True)]
        return Verdict(panic, rollback, reasons, threshold, self.panics.copy())

    def _forgot(self, loss: np.ndarray, mean: np.ndarray, known: np.ndarray) -> np.ndarray:
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

        The first loss has only a random guess to be compared with; where that is not known, any
        finite loss may be the scale of the task, and no loss is too high in itself.
        """
        guess = np.inf if self.random_guess_loss is None else self.random_guess_loss
        usual = np.where(known > 0, mean, np.where(self.trusts, np.inf, guess))
        statistical = np.where(
            known >= c.GOVERNOR_MIN_HISTORY, mean + c.GOVERNOR_SENSITIVITY * deviation, 0.0
        )
        relative = c.GOVERNOR_LOSS_MULTIPLIER * usual
        least = 0.0 if self.random_guess_loss is None else c.GOVERNOR_ABSOLUTE_THRESHOLD
        return np.maximum(least, np.maximum(statistical, relative))

    def save(self, env: int, host: SavedHost) -> None:
        """Replace the environment's snapshot; the caller has seen that the host is healthy."""
        self.saved[env] = host

    def last_healthy(self, env: int) -> SavedHost:
        saved = self.saved[env]
        assert saved is not None, "a host is saved before its first epoch"
        return saved

    def renew(self, env: int) -> None:
        """Forget the losses of a network whose output was scaled: those that come have another
        scale. What is known of its score stays."""
        self.history[env] = np.nan
        self.trusts[env] = False

    def forgive(self, env: int) -> None:
        """Start counting panics anew, after a rollback."""
        self.panics[env] = 0


def _reason(not_finite: bool, lobotomy: bool, collapse: bool) -> str:
    if not_finite:
        return "loss_not_finite"
    if lobotomy:
        return "loss_of_a_guess"
    return "score_collapse" if collapse else "loss_explosion"


def _mean_and_deviation(history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Over what is known of each row; 0 where nothing is."""
    present = ~np.isnan(history)
    count = np.maximum(present.sum(axis=1), 1)
    values = np.where(present, history, 0.0)
    mean = values.sum(axis=1) / count
    variance = (np.where(present, (values - mean[:, None]) ** 2, 0.0)).sum(axis=1) / count
    return mean, np.sqrt(variance)


# --- what it tells -------------------------------------------------------------------------------


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
    """`culprits` are the modules and ids of slots that are closed."""
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
