"""The observation for a network over sets: features of the run, of each slot, and of each
candidate, which is a blueprint in a slot.

One flat row per environment, `[global | S x slot | S x B x candidate]`; `SetLayout` splits it.
Slots and blueprints are described by their properties, not by index or name, so features mean the
same in any host and catalogue. Every entry is in [-2, 2] by construction; there is no normalisation
per column, because it would distinguish slots. What was not measured is 0, with a flag next to it.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from esper.leyline import ActionMasks, ConfigError, LifecycleOp, SeedStage
from esper.leyline.constants import SEED_EXPLODING_NORM, SEED_VANISHING_NORM
from esper.tamiyo.policy.features import LIMIT, bounded, loss_feature, symlog
from esper.tamiyo.situation import Situation
from esper.tamiyo.slot_facts import SlotFacts

KINDS = ("residual", "branch", "bypass")
STAGES = tuple(stage for stage in SeedStage if stage != SeedStage.UNKNOWN)
# Epochs ago: earlier values of score and loss, relative to the current ones.
BACK = (1, 2, 3, 4)

GLOBAL_FEATURES = (
    *("epoch", "left", "batches", "train_loss", "val_loss", "best_val_loss", "loss_delta"),
    *("train_score", "val_score", "best_val_score", "score_gap", "score_delta", "plateau"),
    *("stabilized", "noise_known", "noise"),
    *(f"loss_{back}_ago" for back in BACK),
    *(f"score_{back}_ago" for back in BACK),
    *("host_params", "host_macs", "params_over_host", "macs_over_host"),
    *("slots", "seeds", "seeds_of_most", "may_germinate"),
    *("trained", "extra_known", "extra", "rho_known", "rho"),
)
SLOT_FEATURES = (
    *("present", "position", "channels", "channels_over_others", "places"),
    *("params_of_host", "macs_known", "macs_of_host"),
    *("may_germinate", "may_cull", "may_fossilize"),
    *("holds", *(stage.name.lower() for stage in STAGES), "epochs_in_stage", "age", "alpha"),
    *("contribution_known", "contribution", "contribution_over_noise"),
    *("improvement", "improvement_in_stage", "seed_params", "seed_macs"),
    *("gradient_known", "gradient_norm", "gradient_ratio", "gradient_health"),
    *("vanishing", "exploding", "healthy"),
)
CANDIDATE_FEATURES = (
    *("fits", "allowed", "planted", *KINDS, "mixes_positions"),
    *("params", "params_over_host", "macs_over_host", "layers", "reach"),
)
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
    # Differences of values that are not finite, as in a broken network, are unknown.
    with np.errstate(invalid="ignore"):
        run = _stacked(_run(situation, facts), GLOBAL_FEATURES, shape[:1])
        of_slots = _stacked(_slots(situation, facts), SLOT_FEATURES, shape[:2])
        candidates = _stacked(_candidates(situation, facts), CANDIDATE_FEATURES, shape)
    # A blueprint that does not fit is no candidate: all its features are 0.
    candidates *= facts.fits[..., None]
    blocks = [
        run,
        np.pad(of_slots, [(0, 0), (0, missing), (0, 0)]),
        np.pad(candidates, [(0, 0), (0, missing), (0, 0), (0, 0)]),
    ]
    return np.concatenate([block.reshape(situation.n_envs, -1) for block in blocks], axis=1)


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


def _stacked(
    columns: Mapping[str, np.ndarray | float], names: tuple[str, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """float32 [*shape, len(names)]."""
    stacked = np.empty((*shape, len(names)), dtype=np.float32)
    for place, name in enumerate(names):
        stacked[..., place] = columns[name]
    return bounded(stacked)


def _decades(ratio: np.ndarray | float) -> np.ndarray:
    """Half the orders of magnitude: a hundredth is -1, zero is -LIMIT."""
    return np.log10(np.maximum(ratio, 10 ** (-2 * LIMIT))) / 2


def _run(s: Situation, facts: SlotFacts) -> dict[str, np.ndarray | float]:
    signals, table, unknown = s.signals, s.table, np.full(s.n_envs, np.nan)
    noise = table.noise[:, 0]
    extra = unknown if s.extra is None else s.extra
    rho = unknown if s.rho is None else s.rho
    held = table.holds_seed.sum(axis=1)
    loss, score = loss_feature(signals.val_loss), signals.val_score
    return {
        "epoch": signals.epoch / s.max_steps,
        "left": s.left,
        "batches": np.log1p(signals.global_step) / 8,
        "train_loss": loss_feature(signals.train_loss),
        "val_loss": loss,
        "best_val_loss": loss_feature(signals.best_val_loss),
        "loss_delta": symlog(signals.loss_delta),
        "train_score": signals.train_score / 100,
        "val_score": score / 100,
        "best_val_score": signals.best_val_score / 100,
        "score_gap": (signals.train_score - score) / 20,
        "score_delta": signals.score_delta / 10,
        "plateau": signals.plateau_epochs / 10,
        "stabilized": signals.host_stabilized,
        "noise_known": np.isfinite(noise),
        "noise": symlog(noise),
        **{f"loss_{n}_ago": _before(signals.loss_history, n) - loss for n in BACK},
        **{f"score_{n}_ago": (signals.score_history[:, -1 - n] - score) / 10 for n in BACK},
        "host_params": math.log10(max(1, s.host_params)) / 4,
        "host_macs": math.log10(max(1, facts.host_macs)) / 5,
        "params_over_host": np.log(s.total_params / max(1, s.host_params)),
        "macs_over_host": np.log1p(table.macs.sum(axis=1) / max(1, facts.host_macs)),
        "slots": math.log2(len(facts.position)) / 2,
        "seeds": held / 4,
        "seeds_of_most": held / s.max_seeds if s.max_seeds else np.zeros(s.n_envs),
        "may_germinate": s.masks.op[:, LifecycleOp.GERMINATE],
        "trained": float(s.trained),
        "extra_known": np.isfinite(extra),
        "extra": np.log(np.maximum(extra, 1e-3)) / 2,
        "rho_known": np.isfinite(rho),
        "rho": rho,
    }


def _before(losses: np.ndarray, back: int) -> np.ndarray:
    """[E]: the loss `back` epochs ago, NaN before the start."""
    past = losses[:, -1 - back]
    return np.where(np.isnan(past), np.nan, loss_feature(past))


def _slots(s: Situation, facts: SlotFacts) -> dict[str, np.ndarray | float]:
    table, held = s.table, s.table.holds_seed
    norm, worth = table.gradient_norm, table.contribution
    return {
        "present": 1.0,
        "position": facts.position,
        "channels": np.log2(facts.channels) / 5,
        "channels_over_others": _over_others(facts.channels),
        "places": np.log2(facts.positions) / 5,
        "params_of_host": facts.params,
        "macs_known": np.isfinite(facts.macs),
        "macs_of_host": facts.macs,
        "may_germinate": s.masks.slot[:, LifecycleOp.GERMINATE],
        "may_cull": s.masks.slot[:, LifecycleOp.CULL],
        "may_fossilize": s.masks.slot[:, LifecycleOp.FOSSILIZE],
        "holds": held,
        **{stage.name.lower(): table.stage == stage for stage in STAGES},
        "epochs_in_stage": np.log1p(table.epochs_in_stage) / 2,
        "age": np.log1p(table.epochs_total) / 2,
        "alpha": table.alpha,
        "contribution_known": np.isfinite(worth),
        "contribution": worth / 10,
        "contribution_over_noise": symlog(worth / np.maximum(table.noise, 1e-3)) / 2,
        "improvement": table.total_improvement / 10,
        "improvement_in_stage": table.improvement_since_stage_start / 10,
        "seed_params": np.log1p(table.params / max(1, s.host_params)),
        "seed_macs": np.log1p(table.macs / max(1, facts.host_macs)),
        "gradient_known": np.isfinite(norm),
        "gradient_norm": symlog(norm) / 2,
        "gradient_ratio": symlog(table.gradient_ratio),
        "gradient_health": table.gradient_health,
        "vanishing": norm < SEED_VANISHING_NORM,
        "exploding": norm > SEED_EXPLODING_NORM,
        "healthy": held & table.healthy,
    }


def _over_others(channels: np.ndarray) -> np.ndarray:
    """[S]: log of a slot's width relative to the mean of the others; 0 for a single slot."""
    if len(channels) == 1:
        return np.zeros(1)
    others = (channels.sum() - channels) / (len(channels) - 1)
    return np.log(channels / others)


def _candidates(s: Situation, facts: SlotFacts) -> dict[str, np.ndarray | float]:
    specs = s.catalogue.specs
    places = np.arange(len(specs))
    return {
        "fits": facts.fits,
        "allowed": s.masks.blueprint & s.masks.slot[:, LifecycleOp.GERMINATE, :, None],
        "planted": s.table.blueprint[:, :, None] == places,
        **{kind: np.array([spec.kind == kind for spec in specs]) for kind in KINDS},
        "mixes_positions": np.array([spec.mixes_positions for spec in specs]),
        "params": _decades(facts.seed_params),
        "params_over_host": _decades(facts.seed_params / max(1, s.host_params)),
        "macs_over_host": _decades(facts.seed_macs / max(1, facts.host_macs)),
        "layers": facts.seed_layers / 4,
        "reach": (facts.seed_reach - 1) / 2,
    }
