"""The observation: one row of bounded numbers per environment.

Layout for S slots and B blueprints (`feature_size` computes the width):

  0-22            the training: epoch, step, losses, scores, their last five values, size, use
  23 + (4 + B)*i  slot i: holds a seed, stage, alpha, contribution, blueprint one-hot
  then 10*i       slot i: telemetry of its seed; all zero for an empty slot

Every entry is scaled to about [-2, 2]. What was not measured is 0; a flag tells whether there is a
seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.leyline import SeedStage
from esper.leyline.constants import SEED_EXPLODING_NORM, SEED_VANISHING_NORM
from esper.tamiyo.situation import Situation

BASE_FEATURES = 23
SLOT_FEATURES = 4
TELEMETRY_FEATURES = 10
LIMIT = 2.0


@dataclass(frozen=True)
class FeatureExtractionContext:
    """The situation, and whether to include the telemetry."""

    situation: Situation
    use_telemetry: bool = True


def feature_size(n_slots: int, n_blueprints: int, *, use_telemetry: bool = True) -> int:
    per_slot = SLOT_FEATURES + n_blueprints + TELEMETRY_FEATURES * use_telemetry
    return BASE_FEATURES + n_slots * per_slot


BASE_NAMES = (
    "epoch / epochs",
    "log batches / 8",
    "symlog training loss / 2",
    "symlog validation loss / 2",
    "symlog change of loss",
    "training score / 100",
    "validation score / 100",
    "change of score / 10",
    "epochs on a plateau / 10",
    "best score / 100",
    "symlog best loss / 2",
    *(f"symlog loss {ago} epochs ago / 2" for ago in (4, 3, 2, 1, 0)),
    *(f"score {ago} epochs ago / 100" for ago in (4, 3, 2, 1, 0)),
    "log size over the host's",
    "share of the seeds allowed",
)
SLOT_NAMES = ("holds a seed", "stage / 10", "alpha", "worth / 10")
TELEMETRY_NAMES = (
    "gradient norm / 10",
    "gradient health",
    "gradients vanish",
    "gradients explode",
    "epochs in stage / 50",
    "score / 100",
    "improvement in stage / 10",
    "way through life",
    "alpha (telemetry)",
    "epoch / epochs",
)
TRAINING = "training"


def feature_names(
    modules: Sequence[str], blueprints: Sequence[str], *, use_telemetry: bool = True
) -> list[tuple[str, str]]:
    """(block, entry) of each column of the observation; a slot is a block by its module's name."""
    slot = (*SLOT_NAMES, *(f"is {blueprint}" for blueprint in blueprints))
    names = [(TRAINING, name) for name in BASE_NAMES]
    names += [(module, name) for module in modules for name in slot]
    if use_telemetry:
        names += [(module, name) for module in modules for name in TELEMETRY_NAMES]
    return names


def symlog(x: np.ndarray) -> np.ndarray:
    """sign(x) * log(1 + |x|): linear near 0, logarithmic far away (Hafner et al. 2023)."""
    return np.sign(x) * np.log1p(np.abs(x))


def bounded(x: np.ndarray, absent: float = 0.0) -> np.ndarray:
    """Within [-LIMIT, LIMIT], and `absent` where it is NaN."""
    # Like np.clip and np.nan_to_num, in a third of the time for small arrays.
    return np.minimum(np.maximum(np.where(np.isnan(x), absent, x), -LIMIT), LIMIT)


def signals_to_features(context: FeatureExtractionContext) -> np.ndarray:
    """float32 [E, feature_size(S, B)], every entry finite and in [-LIMIT, LIMIT]."""
    blocks = [_base(context.situation), _slots(context.situation)]
    if context.use_telemetry:
        blocks.append(_telemetry(context.situation))
    return np.concatenate(blocks, axis=1).astype(np.float32)


def loss_feature(loss: np.ndarray) -> np.ndarray:
    """A loss on the scale of an observation; one that is not finite is very bad."""
    return bounded(symlog(loss) / 2, absent=LIMIT)


def _base(s: Situation) -> np.ndarray:
    signals = s.signals
    train, val, best, *history = loss_feature(
        np.stack(
            [
                signals.train_loss,
                signals.val_loss,
                signals.best_val_loss,
                # No loss, as before the start, is not a bad loss.
                *np.where(np.isnan(signals.loss_history), 0.0, signals.loss_history).T,
            ]
        )
    )
    columns = [
        signals.epoch / s.max_steps,
        np.log1p(signals.global_step) / 8,
        train,
        val,
        symlog(signals.loss_delta),
        signals.train_score / 100,
        signals.val_score / 100,
        signals.score_delta / 10,
        signals.plateau_epochs / 10,
        signals.best_val_score / 100,
        best,
        *history,
        *(signals.score_history / 100).T,
        np.log(s.total_params / s.host_params),
        s.table.holds_seed.sum(axis=1) / s.max_seeds if s.max_seeds else np.zeros(s.n_envs),
    ]
    return bounded(np.stack(columns, axis=1))


def _slots(s: Situation) -> np.ndarray:
    table, held = s.table, s.table.holds_seed
    worth = np.where(
        np.isnan(table.contribution), table.improvement_since_stage_start, table.contribution
    )
    occupant = np.stack(
        [held, table.stage / max(SeedStage), table.alpha, np.where(held, worth, 0.0) / 10], axis=2
    )
    one_hot = table.blueprint[:, :, None] == np.arange(len(s.catalogue))
    block = np.concatenate([occupant, one_hot], axis=2)
    return bounded(block.reshape(s.n_envs, -1))


def _telemetry(s: Situation) -> np.ndarray:
    table = s.table
    norm, health = table.gradient_norm, table.gradient_health
    columns = [
        np.minimum(norm, 10) / 10,
        health,
        norm < SEED_VANISHING_NORM,
        norm > SEED_EXPLODING_NORM,
        np.minimum(table.epochs_in_stage, 50) / 50,
        table.score / 100,
        np.clip(table.improvement_since_stage_start / 10, -1, 1),
        np.minimum((table.stage - 1) / 6, 1),
        table.alpha,
        np.broadcast_to(s.signals.epoch[:, None] / s.max_steps, table.shape),
    ]
    block = np.stack(columns, axis=2) * table.holds_seed[:, :, None]
    return bounded(block.reshape(s.n_envs, -1))
