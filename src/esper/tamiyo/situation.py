"""What a controller sees before it decides, the tracker of its signals, the interface of a
controller."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from esper.growth.blueprints.catalogue import (
    BlueprintCatalogue,
    BlueprintSpec,
    count_params,
    seed_traits,
)
from esper.growth.grown_module import GrownModule
from esper.growth.slot_table import SlotTable
from esper.leyline import (
    HEAD_NAMES,
    IS_LIVE,
    OP,
    ActionMasks,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    TrainingSignals,
)
from esper.leyline import constants as c
from esper.leyline.events import Decided
from esper.tamiyo.policy.action_masks import GrowthLimits


# Compared by identity, so that what is derived from them can be cached.
@dataclass(frozen=True, eq=False)
class SlotFacts:
    """S slots of a host and B candidates in each, the same for all hosts of an architecture.

    specs          the B blueprints
    host_params, host_macs   parameters of the host, and multiply-adds per example
    position       float[S], 0 at the input, 1 at the output
    channels       int[S]
    positions      int[S], number of pixels or tokens that a seed reads; 1 for vectors
    params, macs   float[S], share of the host in the slot's module; NaN if unknown
    fits           bool[S, B]
    seed_params, seed_macs   int[S, B], cost of a candidate, as in the masks
    seed_layers, seed_reach  int[S, B], its number of weight matrices, and its widest kernel
    """

    specs: tuple[BlueprintSpec, ...]
    host_params: int
    host_macs: int
    position: np.ndarray
    channels: np.ndarray
    positions: np.ndarray
    params: np.ndarray
    macs: np.ndarray
    fits: np.ndarray
    seed_params: np.ndarray
    seed_macs: np.ndarray
    seed_layers: np.ndarray
    seed_reach: np.ndarray


def describe_slots(template: GrownModule, limits: GrowthLimits) -> SlotFacts:
    sites, host = template.sites, template.host
    _, traits = seed_traits(template.catalogue, sites, template.output)
    own = np.array([count_params(host.get_submodule(site.module)) for site in sites])
    macs = np.array([np.nan if site.macs is None else site.macs for site in sites])
    channels = np.array([site.channels for site in sites])
    host_params = count_params(host)
    return SlotFacts(
        specs=template.catalogue.specs,
        host_params=host_params,
        host_macs=template.host_macs,
        position=np.array([site.position for site in sites]),
        channels=channels,
        positions=np.array([int(np.prod(site.shape)) for site in sites]) // channels,
        params=own / max(1, host_params),
        macs=macs / max(1, template.host_macs),
        fits=limits.fits,
        seed_params=limits.params,
        seed_macs=limits.macs,
        seed_layers=traits[..., 2],
        seed_reach=traits[..., 3],
    )


@dataclass(frozen=True)
class Situation:
    """E environments after step `step` of `max_steps`; a controller must not change any of it.

    keys          int[E], the key of each environment's episode
    running       bool[E], False once an environment's episode is over
    total_params  int[E], host and seeds together
    left          float[E], the remaining share of the steps or of the budget of multiply-adds,
                  whichever is less
    max_seeds     most seeds of an environment, None for no limit
    trained       the hosts are already trained; step 0 comes before the first epoch
    facts         static properties of slots and candidates; None if made by hand
    extra         float[E], the budget of multiply-adds relative to the cost of the host's training,
                  NaN or None if there is none
    rho           float[E], how much is left to learn (`engine/starvation.py`), NaN or None if
                  unknown
    """

    step: int
    max_steps: int
    keys: np.ndarray
    running: np.ndarray
    signals: TrainingSignals
    table: SlotTable
    masks: ActionMasks
    slot_config: SlotConfig
    catalogue: BlueprintCatalogue
    host_params: int
    total_params: np.ndarray
    left: np.ndarray
    max_seeds: int | None = None
    trained: bool = False
    facts: SlotFacts | None = None
    extra: np.ndarray | None = None
    rho: np.ndarray | None = None

    @property
    def n_envs(self) -> int:
        return len(self.keys)


class Controller(Protocol):
    """Rule or learned policy. `reset` is called before the first `act` of every episode.

    A controller with a state of its own also has `state_dict()` and `load_state_dict(state)`, with
    tensors and plain values, so that an episode can be resumed.
    """

    name: str

    def reset(self, n_envs: int) -> None: ...

    def act(self, situation: Situation) -> np.ndarray:
        """int64 [E, 4] in the order of HEAD_NAMES; every row legal, irrelevant heads 0."""


@runtime_checkable
class GivesReasons(Protocol):
    """A controller that can explain its decisions."""

    def reasons(self, actions: np.ndarray) -> list[Decided]:
        """An event for each running environment, about the situation of the last `act`."""


def wait(n_envs: int) -> np.ndarray:
    """The action WAIT for every environment."""
    actions = np.zeros((n_envs, len(HEAD_NAMES)), dtype=np.int64)
    actions[:, OP] = LifecycleOp.WAIT
    return actions


HISTORY = 5
# The median of |x - 2y + z| of normal numbers, in their deviations: 0.6745 * sqrt(1 + 4 + 1).
SECOND_DIFFERENCE = 1.6522


def score_noise(scores: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """[E]: random variation of scores ([E, T], oldest first, NaN where unknown), in their unit.

    It is the median second difference of the last epochs, which a steady rise does not affect. It
    is at least a share of the spread of all scores, because a curve may be too smooth, and at least
    `chance` ([E]), the standard error of a single score if known. Else NaN before the third score.
    """
    bends = np.abs(np.diff(scores[:, -c.SIGNAL_HISTORY_WINDOW :], n=2, axis=1))
    noise = np.full(len(scores), np.nan)
    known = np.flatnonzero(~np.isnan(bends).all(axis=1))
    if len(known):
        spread = _quantile(scores[known], 0.75) - _quantile(scores[known], 0.25)
        noise[known] = _quantile(bends[known], 0.5) / SECOND_DIFFERENCE
        noise[known] = np.maximum(noise[known], c.NOISE_OF_SPREAD * spread)
    return np.fmax(noise, chance)


def _quantile(scores: np.ndarray, share: float) -> np.ndarray:
    """[E]: like `np.nanquantile` along rows, but 50 times as fast."""
    rank = share * ((~np.isnan(scores)).sum(axis=1, keepdims=True) - 1)
    below = np.floor(rank).astype(np.int64)
    ordered = np.sort(scores, axis=1)  # NaN last
    low = np.take_along_axis(ordered, below, axis=1)
    high = np.take_along_axis(ordered, np.ceil(rank).astype(np.int64), axis=1)
    return np.asarray((low + (high - low) * (rank - below))[:, 0])


class SignalTracker:
    """Call `update` after every epoch with its measurements, [E] arrays.

    A plateau counts the epochs since the best score last rose by PLATEAU_RISE times its `noise`
    [E]. A host is stabilised after `stabilization_epochs` consecutive epochs whose validation loss
    neither fell much nor jumped (0: from the start), and stays so until `reset`.
    """

    def __init__(self, n_envs: int, stabilization_epochs: int = c.STABILIZATION_EPOCHS) -> None:
        self.n_envs, self.stabilization_epochs = n_envs, stabilization_epochs
        self.reset()

    def reset(self) -> None:
        shape = (self.n_envs,)
        self.plateau = np.zeros(shape, dtype=np.int64)
        self.plateau_base = np.full(shape, np.nan)
        self.stable = np.zeros(shape, dtype=np.int64)
        self.stabilized = np.full(shape, self.stabilization_epochs == 0)
        self.best_score = np.full(shape, np.nan)
        self.best_loss = np.full(shape, np.nan)
        self.noise = np.full(shape, np.nan)
        self.losses = np.full((self.n_envs, HISTORY), np.nan)
        self.scores = np.full((self.n_envs, HISTORY), np.nan)  # all of them, after these

    def update(
        self,
        epoch: int,
        global_step: int,
        train_loss: np.ndarray,
        train_score: np.ndarray,
        val_loss: np.ndarray,
        val_score: np.ndarray,
        chance: np.ndarray | None = None,
    ) -> TrainingSignals:
        """`chance` is the standard error of each score, if known."""
        previous_loss = self.losses[:, -1]
        loss_delta = previous_loss - val_loss
        score_delta = val_score - self.scores[:, -1]
        self.scores = np.concatenate([self.scores, val_score[:, None]], axis=1)
        unknown = np.full(self.n_envs, np.nan)
        self.noise = score_noise(self.scores, unknown if chance is None else chance)
        # Compared with the best, not the last epoch: else noise would count as progress.
        rose = ~(val_score <= self.plateau_base + c.PLATEAU_RISE * self.noise)
        self.plateau_base = np.where(rose, val_score, self.plateau_base)
        self.plateau = np.where(rose, 0, self.plateau + 1)
        # Comparisons with NaN, before the first epoch or after a fault, are False.
        stable = (
            (previous_loss > 1e-8)
            & (loss_delta < c.STABILIZATION_THRESHOLD * previous_loss)
            & (val_loss < c.STABILIZATION_SPIKE * previous_loss)
        )
        self.stable = np.where(stable, self.stable + 1, 0)
        self.stabilized = self.stabilized | (self.stable >= self.stabilization_epochs)
        self.best_score = np.fmax(self.best_score, val_score)
        self.best_loss = np.fmin(self.best_loss, val_loss)
        self.losses = np.concatenate([self.losses[:, 1:], val_loss[:, None]], axis=1)
        return TrainingSignals(
            epoch=np.full(self.n_envs, epoch),
            global_step=np.full(self.n_envs, global_step),
            train_loss=train_loss,
            val_loss=val_loss,
            loss_delta=loss_delta,
            train_score=train_score,
            val_score=val_score,
            score_delta=score_delta,
            plateau_epochs=self.plateau,
            host_stabilized=self.stabilized,
            best_val_score=self.best_score,
            best_val_loss=self.best_loss,
            loss_history=self.losses,
            score_history=self.scores[:, -HISTORY:],
        )


# A policy may see only some of the candidates.
NO_CANDIDATE = "does not fit the slot, or the policy was not trained with it"


def why_no_op(s: Situation, env: int, op: LifecycleOp) -> str | None:
    """None if the op is legal."""
    if s.masks.op[env, op]:
        return None
    if not s.running[env]:
        return "the episode is over"
    reasons = {why_no_slot(s, env, op, slot) for slot in range(s.slot_config.num_slots)}
    if len(reasons) == 1:
        return f"every slot: {reasons.pop()}"
    return {
        LifecycleOp.GERMINATE: "no slot is free for a seed that fits and can be paid for",
        LifecycleOp.CULL: "no live seed is old enough",
        LifecycleOp.FOSSILIZE: "no seed is HOLDING and contributes enough",
    }[op]


def why_no_slot(s: Situation, env: int, op: LifecycleOp, slot: int) -> str | None:
    """Why the op cannot be done in a slot; None if it can."""
    if s.masks.slot[env, op, slot]:
        return None
    if not s.running[env]:
        return "the episode is over"
    stage = SeedStage(s.table.stage[env, slot])
    if op == LifecycleOp.GERMINATE:
        if s.table.holds_seed[env, slot]:
            return f"its seed is {stage.name}"
        if stage != SeedStage.DORMANT:
            return f"it rests ({stage.name})"
        if not s.masks.blueprint[env, slot].any():
            return "no blueprint fits it and the rest of the budget"
        return f"the network holds {s.max_seeds} seeds, the maximum"
    if op == LifecycleOp.CULL:
        if stage == SeedStage.FOSSILIZED:
            return "its seed is kept, and no audit of it is due"
        if not IS_LIVE[stage]:
            return f"it holds no live seed ({stage.name})"
        return f"its seed is younger than {c.MIN_CULL_AGE} epochs"
    if stage != SeedStage.HOLDING:
        return f"it is {stage.name}, not HOLDING"
    return "its seed does not contribute enough"


def why_no_blueprint(s: Situation, env: int, slot: int, blueprint: int) -> str | None:
    """Why a blueprint cannot be planted in a slot; None if it can."""
    if s.masks.blueprint[env, slot, blueprint]:
        return None
    if s.facts is None:
        return "does not fit the slot, or costs more than is left"
    return "costs more than is left" if s.facts.fits[slot, blueprint] else NO_CANDIDATE
