"""The observation: one row of bounded numbers per environment.

The columns of the training come first, then for each slot those of its seed and its blueprint
one-hot, then for each slot the telemetry of its seed, which is all zero for an empty slot.

Every entry is scaled to about [-2, 2]. What was not measured is 0; a flag tells whether there is a
seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from esper.leyline import SeedStage
from esper.leyline.constants import SEED_EXPLODING_NORM, SEED_VANISHING_NORM
from esper.tamiyo.situation import Situation

TRAINING = "training"
LIMIT = 2.0


@dataclass(frozen=True)
class FeatureExtractionContext:
    """The situation, and whether to include the telemetry."""

    situation: Situation
    use_telemetry: bool = True


def symlog(x: np.ndarray) -> np.ndarray:
    """sign(x) * log(1 + |x|): linear near 0, logarithmic far away (Hafner et al. 2023)."""
    return np.sign(x) * np.log1p(np.abs(x))


def bounded(x: np.ndarray, absent: float = 0.0) -> np.ndarray:
    """Within [-LIMIT, LIMIT], and `absent` where it is NaN."""
    # Like np.clip and np.nan_to_num, in a third of the time for small arrays.
    return np.minimum(np.maximum(np.where(np.isnan(x), absent, x), -LIMIT), LIMIT)


def loss_feature(loss: np.ndarray) -> np.ndarray:
    """A loss on the scale of an observation; one that is not finite is very bad."""
    return bounded(symlog(loss) / 2, absent=LIMIT)


def seeds_of_most(s: Situation) -> np.ndarray:
    """[E]: the number of seeds as a share of the most allowed; 0 without a limit."""
    return s.table.holds_seed.sum(axis=1) / s.max_seeds if s.max_seeds else np.zeros(s.n_envs)


def _past_loss(ago: int) -> Callable[[Situation], np.ndarray]:
    def feature(s: Situation) -> np.ndarray:
        loss = s.signals.loss_history[:, -1 - ago]
        # No loss, as before the start, is not a bad loss.
        return loss_feature(np.where(np.isnan(loss), 0.0, loss))

    return feature


def _past_score(ago: int) -> Callable[[Situation], np.ndarray]:
    return lambda s: s.signals.score_history[:, -1 - ago] / 100


def _contribution(s: Situation) -> np.ndarray:
    known = ~np.isnan(s.table.contribution)
    value = np.where(known, s.table.contribution, s.table.improvement_since_stage_start)
    return np.where(s.table.holds_seed, value, 0.0)


# Each entry of these tables is one column: a name, and its values [E], or [E, S] for slots.
BASE: dict[str, Callable[[Situation], np.ndarray]] = {
    "epoch / epochs": lambda s: s.signals.epoch / s.max_steps,
    "log batches / 8": lambda s: np.log1p(s.signals.global_step) / 8,
    "symlog training loss / 2": lambda s: loss_feature(s.signals.train_loss),
    "symlog validation loss / 2": lambda s: loss_feature(s.signals.val_loss),
    "symlog change of loss": lambda s: symlog(s.signals.loss_delta),
    "training score / 100": lambda s: s.signals.train_score / 100,
    "validation score / 100": lambda s: s.signals.val_score / 100,
    "change of score / 10": lambda s: s.signals.score_delta / 10,
    "epochs on a plateau / 10": lambda s: s.signals.plateau_epochs / 10,
    "best score / 100": lambda s: s.signals.best_val_score / 100,
    "symlog best loss / 2": lambda s: loss_feature(s.signals.best_val_loss),
    **{f"symlog loss {ago} epochs ago / 2": _past_loss(ago) for ago in (4, 3, 2, 1, 0)},
    **{f"score {ago} epochs ago / 100": _past_score(ago) for ago in (4, 3, 2, 1, 0)},
    "log size over the host's": lambda s: np.log(s.total_params / s.host_params),
    "share of the seeds allowed": seeds_of_most,
}
SLOT: dict[str, Callable[[Situation], np.ndarray]] = {
    "holds a seed": lambda s: s.table.holds_seed,
    "stage / 10": lambda s: s.table.stage / max(SeedStage),
    "alpha": lambda s: s.table.alpha,
    "contribution or improvement / 10": lambda s: _contribution(s) / 10,
}
TELEMETRY: dict[str, Callable[[Situation], np.ndarray]] = {
    "gradient norm / 10": lambda s: np.minimum(s.table.gradient_norm, 10) / 10,
    "gradient health": lambda s: s.table.gradient_health,
    "gradients vanish": lambda s: s.table.gradient_norm < SEED_VANISHING_NORM,
    "gradients explode": lambda s: s.table.gradient_norm > SEED_EXPLODING_NORM,
    "epochs in stage / 50": lambda s: np.minimum(s.table.epochs_in_stage, 50) / 50,
    "score / 100": lambda s: s.table.score / 100,
    "improvement in stage / 10": lambda s: np.clip(
        s.table.improvement_since_stage_start / 10, -1, 1
    ),
    "stage from 0 to 1": lambda s: np.minimum((s.table.stage - 1) / 6, 1),
    "alpha (telemetry)": lambda s: s.table.alpha,
    "epoch / epochs": lambda s: s.signals.epoch[:, None] / s.max_steps,
}


def feature_size(n_slots: int, n_blueprints: int, *, use_telemetry: bool = True) -> int:
    per_slot = len(SLOT) + n_blueprints + len(TELEMETRY) * use_telemetry
    return len(BASE) + n_slots * per_slot


def feature_names(
    modules: Sequence[str], blueprints: Sequence[str], *, use_telemetry: bool = True
) -> list[tuple[str, str]]:
    """(block, entry) of each column of the observation; a slot is a block by its module's name."""
    slot = (*SLOT, *(f"is {blueprint}" for blueprint in blueprints))
    names = [(TRAINING, name) for name in BASE]
    names += [(module, name) for module in modules for name in slot]
    if use_telemetry:
        names += [(module, name) for module in modules for name in TELEMETRY]
    return names


# One column, or several that are computed together.
Names = str | tuple[str, ...]


@cache
def _places(names: tuple[Names, ...]) -> tuple[tuple[int | slice, ...], int]:
    """Where each entry of a table stands among the columns, and how many columns there are."""
    places: list[int | slice] = []
    width = 0
    for name in names:
        one, count = isinstance(name, str), 1 if isinstance(name, str) else len(name)
        places.append(width if one else slice(width, width + count))
        width += count
    return tuple(places), width


def stacked(
    columns: Mapping[Any, Callable[..., np.ndarray | float]],
    shape: tuple[int, ...],
    *about: object,
) -> np.ndarray:
    """float32 [*shape, columns]: the columns (by `Names`) as functions of `about`, bounded."""
    places, width = _places(tuple(columns))
    values = np.empty((*shape, width), dtype=np.float32)
    for place, feature in zip(places, columns.values(), strict=True):
        values[..., place] = feature(*about)
    return bounded(values)


def signals_to_features(context: FeatureExtractionContext) -> np.ndarray:
    """float32 [E, feature_size(S, B)], every entry finite and in [-LIMIT, LIMIT]."""
    s, shape = context.situation, context.situation.table.shape
    one_hot = s.table.blueprint[:, :, None] == np.arange(len(s.catalogue))
    blocks = [
        stacked(BASE, shape[:1], s),
        np.concatenate([stacked(SLOT, shape, s), one_hot.astype(np.float32)], axis=2),
    ]
    if context.use_telemetry:
        blocks.append(stacked(TELEMETRY, shape, s) * s.table.holds_seed[:, :, None])
    return np.concatenate([block.reshape(s.n_envs, -1) for block in blocks], axis=1)
