"""The observation for a network over sets: features of the run, of each slot, and of each
candidate, which is a blueprint in a slot.

One flat row per environment, `[global | S x slot | S x B x candidate]`; `SetLayout` splits it.
Slots and blueprints are described by their properties, not by index or name, so features mean the
same in any host and catalogue. Every entry is in [-2, 2] by construction; there is no normalisation
per column, because it would distinguish slots. What was not measured is 0, with a flag next to it.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor

from esper.leyline import ActionMasks, ConfigError, LifecycleOp, SeedStage
from esper.leyline.constants import SEED_EXPLODING_NORM, SEED_VANISHING_NORM
from esper.tamiyo.policy.features import LIMIT, Names, loss_feature, seeds_of_most, stacked, symlog
from esper.tamiyo.situation import Situation, SlotFacts

KINDS = ("residual", "branch", "bypass")
STAGES = tuple(stage for stage in SeedStage if stage != SeedStage.UNKNOWN)
# Epochs ago: earlier values of score and loss, relative to the current ones.
BACK = (1, 2, 3, 4)
AGO = [-1 - back for back in BACK]

# Each entry of these tables is one column: a name, and its values [E], [E, S] or [E, S, B]; or
# several columns that are computed together: their names, and one more dimension. Columns of a slot
# or candidate that never change are functions of the facts alone, [S] or [S, B].
Feature = Callable[[Situation, SlotFacts], np.ndarray | float]
Fixed = Callable[[SlotFacts], np.ndarray | float]


def _decades(ratio: np.ndarray | float) -> np.ndarray:
    """Half the orders of magnitude: a hundredth is -1, zero is -LIMIT."""
    return np.log10(np.maximum(ratio, 10 ** (-2 * LIMIT))) / 2


def _losses_ago(s: Situation, f: SlotFacts) -> np.ndarray:
    past = s.signals.loss_history[:, AGO]
    before = np.where(np.isnan(past), np.nan, loss_feature(past))
    return before - loss_feature(s.signals.val_loss)[:, None]


def _known(values: np.ndarray | None, n_envs: int) -> np.ndarray:
    return np.full(n_envs, np.nan) if values is None else values


def _over_others(f: SlotFacts) -> np.ndarray:
    """[S]: log of a slot's width relative to the mean of the others; 0 for a single slot."""
    if len(f.channels) == 1:
        return np.zeros(1)
    others = (f.channels.sum() - f.channels) / (len(f.channels) - 1)
    return np.log(f.channels / others)


GLOBAL_COLUMNS: dict[Names, Feature] = {
    "epoch": lambda s, f: s.signals.epoch / s.max_steps,
    "left": lambda s, f: s.left,
    "batches": lambda s, f: np.log1p(s.signals.global_step) / 8,
    "train_loss": lambda s, f: loss_feature(s.signals.train_loss),
    "val_loss": lambda s, f: loss_feature(s.signals.val_loss),
    "best_val_loss": lambda s, f: loss_feature(s.signals.best_val_loss),
    "loss_delta": lambda s, f: symlog(s.signals.loss_delta),
    "train_score": lambda s, f: s.signals.train_score / 100,
    "val_score": lambda s, f: s.signals.val_score / 100,
    "best_val_score": lambda s, f: s.signals.best_val_score / 100,
    "score_gap": lambda s, f: (s.signals.train_score - s.signals.val_score) / 20,
    "score_delta": lambda s, f: s.signals.score_delta / 10,
    "plateau": lambda s, f: s.signals.plateau_epochs / 10,
    "stabilized": lambda s, f: s.signals.host_stabilized,
    "noise_known": lambda s, f: np.isfinite(s.table.noise[:, 0]),
    "noise": lambda s, f: symlog(s.table.noise[:, 0]),
    tuple(f"loss_{back}_ago" for back in BACK): _losses_ago,
    tuple(f"score_{back}_ago" for back in BACK): lambda s, f: (
        (s.signals.score_history[:, AGO] - s.signals.val_score[:, None]) / 10
    ),
    "host_params": lambda s, f: math.log10(max(1, s.host_params)) / 4,
    "host_macs": lambda s, f: math.log10(max(1, f.host_macs)) / 5,
    "params_over_host": lambda s, f: np.log(s.total_params / max(1, s.host_params)),
    "macs_over_host": lambda s, f: np.log1p(s.table.macs.sum(axis=1) / max(1, f.host_macs)),
    "slots": lambda s, f: math.log2(len(f.position)) / 2,
    "seeds": lambda s, f: s.table.holds_seed.sum(axis=1) / 4,
    "seeds_of_most": lambda s, f: seeds_of_most(s),
    "may_germinate": lambda s, f: s.masks.op[:, LifecycleOp.GERMINATE],
    "trained": lambda s, f: float(s.trained),
    "extra_known": lambda s, f: np.isfinite(_known(s.extra, s.n_envs)),
    "extra": lambda s, f: np.log(np.maximum(_known(s.extra, s.n_envs), 1e-3)) / 2,
    "rho_known": lambda s, f: np.isfinite(_known(s.rho, s.n_envs)),
    "rho": lambda s, f: _known(s.rho, s.n_envs),
}
SLOT_FIXED: dict[Names, Fixed] = {
    "present": lambda f: 1.0,
    "position": lambda f: f.position,
    "channels": lambda f: np.log2(f.channels) / 5,
    "channels_over_others": _over_others,
    "places": lambda f: np.log2(f.positions) / 5,
    "params_of_host": lambda f: f.params,
    "macs_known": lambda f: np.isfinite(f.macs),
    "macs_of_host": lambda f: f.macs,
}
SLOT_COLUMNS: dict[Names, Feature] = {
    "may_germinate": lambda s, f: s.masks.slot[:, LifecycleOp.GERMINATE],
    "may_cull": lambda s, f: s.masks.slot[:, LifecycleOp.CULL],
    "may_fossilize": lambda s, f: s.masks.slot[:, LifecycleOp.FOSSILIZE],
    "holds": lambda s, f: s.table.holds_seed,
    tuple(stage.name.lower() for stage in STAGES): lambda s, f: (
        s.table.stage[..., None] == np.array(STAGES)
    ),
    "epochs_in_stage": lambda s, f: np.log1p(s.table.epochs_in_stage) / 2,
    "age": lambda s, f: np.log1p(s.table.epochs_total) / 2,
    "alpha": lambda s, f: s.table.alpha,
    "contribution_known": lambda s, f: np.isfinite(s.table.contribution),
    "contribution": lambda s, f: s.table.contribution / 10,
    "contribution_over_noise": lambda s, f: (
        symlog(s.table.contribution / np.maximum(s.table.noise, 1e-3)) / 2
    ),
    "improvement": lambda s, f: s.table.total_improvement / 10,
    "improvement_in_stage": lambda s, f: s.table.improvement_since_stage_start / 10,
    "seed_params": lambda s, f: np.log1p(s.table.params / max(1, s.host_params)),
    "seed_macs": lambda s, f: np.log1p(s.table.macs / max(1, f.host_macs)),
    "gradient_known": lambda s, f: np.isfinite(s.table.gradient_norm),
    "gradient_norm": lambda s, f: symlog(s.table.gradient_norm) / 2,
    "gradient_ratio": lambda s, f: symlog(s.table.gradient_ratio),
    "gradient_health": lambda s, f: s.table.gradient_health,
    "vanishing": lambda s, f: s.table.gradient_norm < SEED_VANISHING_NORM,
    "exploding": lambda s, f: s.table.gradient_norm > SEED_EXPLODING_NORM,
    "healthy": lambda s, f: s.table.holds_seed & s.table.healthy,
}
CANDIDATE_COLUMNS: dict[str, Feature] = {
    "allowed": lambda s, f: s.masks.blueprint & s.masks.slot[:, LifecycleOp.GERMINATE, :, None],
    "planted": lambda s, f: s.table.blueprint[:, :, None] == np.arange(len(s.catalogue)),
}
CANDIDATE_FIXED: dict[Names, Fixed] = {
    "fits": lambda f: f.fits,
    KINDS: lambda f: np.array([[spec.kind == kind for kind in KINDS] for spec in f.specs]),
    "mixes_positions": lambda f: np.array([spec.mixes_positions for spec in f.specs]),
    "params": lambda f: _decades(f.seed_params),
    "params_over_host": lambda f: _decades(f.seed_params / max(1, f.host_params)),
    "macs_over_host": lambda f: _decades(f.seed_macs / max(1, f.host_macs)),
    "layers": lambda f: f.seed_layers / 4,
    "reach": lambda f: (f.seed_reach - 1) / 2,
}


def _names(*tables: Iterable[Names]) -> tuple[str, ...]:
    entries = (entry for table in tables for entry in table)
    return tuple(n for entry in entries for n in ((entry,) if isinstance(entry, str) else entry))


GLOBAL_FEATURES = _names(GLOBAL_COLUMNS)
SLOT_FEATURES = _names(SLOT_FIXED, SLOT_COLUMNS)
CANDIDATE_FEATURES = ("fits", *CANDIDATE_COLUMNS, *_names(CANDIDATE_FIXED)[1:])
# Identifies the columns in files: a policy needs those it was trained with.
SET_COLUMNS = hashlib.sha256(
    " ".join((*GLOBAL_FEATURES, *SLOT_FEATURES, *CANDIDATE_FEATURES)).encode()
).hexdigest()[:16]
# Columns over which the network pools.
PRESENT = SLOT_FEATURES.index("present")
FITS = CANDIDATE_FEATURES.index("fits")


@dataclass(frozen=True)
class SetLayout:
    """The layout of an observation of `num_slots` slots and `num_blueprints` blueprints."""

    num_slots: int
    num_blueprints: int

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Widths of the features of the run, of all slots, and of all candidates."""
        return (
            len(GLOBAL_FEATURES),
            self.num_slots * len(SLOT_FEATURES),
            self.num_slots * self.num_blueprints * len(CANDIDATE_FEATURES),
        )

    @property
    def size(self) -> int:
        return sum(self.blocks)

    def split(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., size] -> global [..., G], slots [..., S, F], candidates [..., S, B, C]."""
        run, slots, candidates = observations.split(self.blocks, dim=-1)
        shape = (self.num_slots, self.num_blueprints, len(CANDIDATE_FEATURES))
        return (
            run,
            slots.unflatten(-1, (self.num_slots, len(SLOT_FEATURES))),
            candidates.unflatten(-1, shape),
        )


def set_feature_names(modules: Sequence[str], blueprints: Sequence[str]) -> list[tuple[str, str]]:
    """(block, entry) of each column of `set_features` for a host with slots at these modules."""
    run = [("the training", _words(name)) for name in GLOBAL_FEATURES]
    slots = [(module, _words(name)) for module in modules for name in SLOT_FEATURES]
    candidates = [
        (f"{blueprint} in {module}", _words(name))
        for module in modules
        for blueprint in blueprints
        for name in CANDIDATE_FEATURES
    ]
    return run + slots + candidates


def _words(name: str) -> str:
    return name.replace("_", " ")


def set_features(situation: Situation, slots: int | None = None) -> np.ndarray:
    """float32 [E, SetLayout(slots, B).size], every entry finite and in [-LIMIT, LIMIT].

    `slots` pads the slots of the hosts with absent ones: zeros, including `present`.
    """
    facts = situation.facts
    if facts is None:
        raise ConfigError("set features need a situation with slot facts; this one has none")
    missing = _missing(situation.table.shape[1], slots)
    shape = (situation.n_envs, *facts.fits.shape)
    fixed_slots, fixed_candidates = _fixed_features(facts)
    of_slots = np.empty((*shape[:2], len(SLOT_FEATURES)), dtype=np.float32)
    of_slots[..., : len(SLOT_FIXED)] = fixed_slots
    # Differences of values that are not finite, as in a broken network, are unknown.
    with np.errstate(invalid="ignore"):
        run = stacked(GLOBAL_COLUMNS, shape[:1], situation, facts)
        of_slots[..., len(SLOT_FIXED) :] = stacked(SLOT_COLUMNS, shape[:2], situation, facts)
    candidates = np.broadcast_to(fixed_candidates, (*shape, len(CANDIDATE_FEATURES))).copy()
    # A blueprint that does not fit is no candidate: all its features are 0.
    for name, feature in CANDIDATE_COLUMNS.items():
        candidates[..., CANDIDATE_FEATURES.index(name)] = feature(situation, facts) & facts.fits
    if missing:
        of_slots = np.pad(of_slots, [(0, 0), (0, missing), (0, 0)])
        candidates = np.pad(candidates, [(0, 0), (0, missing), (0, 0), (0, 0)])
    blocks = (run, of_slots, candidates)
    return np.concatenate([block.reshape(situation.n_envs, -1) for block in blocks], axis=1)


@lru_cache(maxsize=64)
def _fixed_features(facts: SlotFacts) -> tuple[np.ndarray, np.ndarray]:
    """What never changes, [S, columns of a slot] and [S, B, columns of a candidate]; zero in the
    columns that do, and where a blueprint does not fit."""
    slots = stacked(SLOT_FIXED, facts.position.shape, facts)
    candidates = np.zeros((*facts.fits.shape, len(CANDIDATE_FEATURES)), dtype=np.float32)
    columns = [CANDIDATE_FEATURES.index(name) for name in _names(CANDIDATE_FIXED)]
    candidates[..., columns] = stacked(CANDIDATE_FIXED, facts.fits.shape, facts)
    return slots, candidates * facts.fits[..., None]


def pad_masks(masks: ActionMasks, slots: int | None = None) -> ActionMasks:
    """The masks for as many slots as `set_features` shows; nothing is legal in an absent one."""
    missing = _missing(masks.slot.shape[-1], slots)
    if not missing:
        return masks
    return ActionMasks(
        masks.op,
        np.pad(masks.slot, [(0, 0), (0, 0), (0, missing)]),
        np.pad(masks.blueprint, [(0, 0), (0, missing), (0, 0)]),
        masks.blend,
    )


def _missing(there: int, wanted: int | None) -> int:
    if wanted is not None and wanted < there:
        raise ConfigError(f"a host with {there} slots cannot be shown as one with {wanted}")
    return 0 if wanted is None else wanted - there
