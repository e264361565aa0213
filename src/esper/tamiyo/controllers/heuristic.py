"""The rule-based controller: grow when the host plateaus, keep seeds that help.

Blueprints take turns in the first free slot. It does not wait for stabilisation: late growth costs
more than it saves, and contributions are measured by removing the seed, so the host's own progress
does not matter.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from esper.leyline import (
    BLEND,
    BLEND_NAMES,
    BLUEPRINT,
    IS_LIVE,
    OP,
    SLOT,
    ConfigError,
    LifecycleOp,
    SeedStage,
)
from esper.leyline import constants as c
from esper.leyline.settings import check_types, read_toml, refuse_unknown, settings_of
from esper.tamiyo.situation import Situation, wait


@dataclass(frozen=True)
class HeuristicConfig:
    """Epochs are environment steps; changes of the score are in units of its noise.

    blueprint_rotation   order of blueprints; those that do not fit a slot are skipped
    least_extra          an already trained host does not grow with a smaller extra budget, because
                         a seed would not have the time to pay off
    """

    plateau_epochs_to_germinate: int = 1
    min_epochs_before_germinate: int = 5
    cull_after_epochs_without_improvement: int = 5
    cull_if_score_drops_by: float = 1.0
    embargo_epochs_after_cull: int = 5
    min_improvement_to_fossilize: float = 0.35
    penalty_on_cull: float = 2.0
    penalty_decay: float = 0.5
    penalty_threshold: float = 3.0
    blueprint_rotation: tuple[str, ...] = (
        "widen_double",
        "branch",
        "conv_light",
        "mlp_small",
        "conv_heavy",
        "attention",
        "lora_large",
        "norm",
        "depthwise",
    )
    least_extra: float = 0.2
    blend: str = "linear"

    def __post_init__(self) -> None:
        if not self.blueprint_rotation:
            raise ConfigError("the heuristic needs at least one blueprint in its rotation")
        if self.blend not in BLEND_NAMES:
            raise ConfigError(f"blend must be one of {', '.join(BLEND_NAMES)}, got {self.blend!r}")


class HeuristicController:
    """Grows one seed at a time in each environment; all environments are decided at once."""

    def __init__(self, config: HeuristicConfig | None = None, name: str = "heuristic") -> None:
        self.config = config or HeuristicConfig()
        self.name = name

    @staticmethod
    def named(file: str | None = None) -> "HeuristicController":
        """With default settings, or those of a TOML file; raises ConfigError."""
        if file is None:
            return HeuristicController()
        given = read_toml(Path(file))
        refuse_unknown(given, settings_of(HeuristicConfig), "")
        check_types(given, HeuristicConfig, "")
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return HeuristicController(HeuristicConfig(**{**given, **lists}), f"heuristic:{file}")

    def reset(self, n_envs: int) -> None:
        self.next_in_rotation = np.zeros(n_envs, dtype=np.int64)
        self.last_cull = np.full(n_envs, -100)
        self.penalty: np.ndarray | None = None
        self.blueprint_seen: np.ndarray | None = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        arrays = {n: value for n, value in vars(self).items() if isinstance(value, np.ndarray)}
        return {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            setattr(self, name, value.numpy().copy())

    def act(self, situation: Situation) -> np.ndarray:
        self._remember_culls(situation)
        live = IS_LIVE[situation.table.stage]
        occupied = live.any(axis=1)
        actions = wait(situation.n_envs)
        self._germinate(situation, actions)
        self._decide(situation, actions, live.argmax(axis=1), occupied & situation.running)
        self._audit(situation, actions)
        return actions

    def _audit(self, s: Situation, actions: np.ndarray) -> None:
        """Remove the kept seed without which the network is best, where nothing else is done."""
        audited = s.masks.slot[:, LifecycleOp.CULL] & (s.table.stage == SeedStage.FOSSILIZED)
        worth = np.where(audited, np.nan_to_num(s.table.contribution, nan=np.inf), np.inf)
        harmful = (worth.min(axis=1) < 0.0) & (actions[:, OP] == LifecycleOp.WAIT)
        actions[harmful, OP] = LifecycleOp.CULL
        actions[harmful, SLOT] = worth.argmin(axis=1)[harmful]

    def _remember_culls(self, s: Situation) -> None:
        """Penalties decay every step; a culled seed adds to that of its blueprint."""
        live = IS_LIVE[s.table.stage]
        if self.penalty is None or self.blueprint_seen is None:
            self.penalty = np.zeros((s.n_envs, len(s.catalogue)))
            self.blueprint_seen = np.full(live.shape, -1)
        self.penalty *= self.config.penalty_decay
        self.penalty[self.penalty < c.BLUEPRINT_PENALTY_FORGOTTEN] = 0.0
        # Slots whose seed was culled since the last step.
        envs, slots = np.nonzero((self.blueprint_seen >= 0) & ~s.table.holds_seed)
        np.add.at(
            self.penalty, (envs, self.blueprint_seen[envs, slots]), self.config.penalty_on_cull
        )
        self.last_cull[envs] = s.step
        self.blueprint_seen = np.where(live, s.table.blueprint, -1)

    def _ready(self, s: Situation) -> np.ndarray:
        """bool[E]: whether a seed may be planted now."""
        config = self.config
        plateau = (s.step >= config.min_epochs_before_germinate) & (
            s.signals.plateau_epochs >= config.plateau_epochs_to_germinate
        )
        if s.trained and s.step == 0:
            plateau = np.ones(s.n_envs, dtype=bool)  # it had its plateau in its first training
        if s.trained and s.extra is not None:
            plateau &= ~(s.extra < config.least_extra)  # an unknown budget (NaN) is no obstacle
        return (
            ~IS_LIVE[s.table.stage].any(axis=1)
            & s.running
            & s.masks.slot[:, LifecycleOp.GERMINATE].any(axis=1)
            & (s.step - self.last_cull >= config.embargo_epochs_after_cull)
            & plateau
        )

    def _germinate(self, s: Situation, actions: np.ndarray) -> None:
        ready = self._ready(s)
        slot = s.masks.slot[:, LifecycleOp.GERMINATE].argmax(axis=1)
        blueprint, found = self._next_blueprint(s, slot, ready)
        go = ready & found
        actions[go, OP] = LifecycleOp.GERMINATE
        actions[go, SLOT] = slot[go]
        actions[go, BLUEPRINT] = blueprint[go]
        actions[go, BLEND] = BLEND_NAMES.index(self.config.blend)

    def _next_blueprint(
        self, s: Situation, slot: np.ndarray, wanted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next blueprint of the rotation that fits and is not penalised, else the least
        penalised that fits; and whether any fits."""
        assert self.penalty is not None
        rotation = np.array(
            [s.catalogue.index(n) for n in self.config.blueprint_rotation if n in s.catalogue.names]
        )
        envs = np.arange(s.n_envs)
        turn = (self.next_in_rotation[:, None] + np.arange(len(rotation))) % len(rotation)
        candidates = rotation[turn]
        fits = s.masks.blueprint[envs[:, None], slot[:, None], candidates]
        penalty = np.where(fits, self.penalty[envs[:, None], candidates], np.inf)
        good = penalty < self.config.penalty_threshold
        choice = np.where(good.any(axis=1), good.argmax(axis=1), penalty.argmin(axis=1))
        found = fits.any(axis=1)
        advance = wanted & found
        self.next_in_rotation[advance] = (turn[envs, choice] + 1)[advance] % len(rotation)
        return candidates[envs, choice], found

    def _decide(
        self, s: Situation, actions: np.ndarray, slot: np.ndarray, occupied: np.ndarray
    ) -> None:
        """Remove seeds that hurt; keep seeds on trial that contribute.

        The score of an already trained host falls at first, because the learning rate rises again:
        there only the contribution counts, and a seed has time to make one.
        """
        config, table, envs = self.config, s.table, np.arange(s.n_envs)
        stage = table.stage[envs, slot]
        contribution = table.contribution[envs, slot]
        total = table.total_improvement[envs, slot]
        drop = table.improvement_since_stage_start[envs, slot]
        noise = table.noise[envs, slot]

        growing = np.isin(stage, (SeedStage.TRAINING, SeedStage.BLENDING))
        tried = table.epochs_in_stage[envs, slot] >= config.cull_after_epochs_without_improvement
        hurts = growing & tried & (drop < -config.cull_if_score_drops_by * noise) & (not s.trained)

        holding = stage == SeedStage.HOLDING
        # Ransom: the network depends on the seed, although the seed made it worse.
        ransom = (contribution > c.RANSOM_CONTRIBUTION * noise) & (total < 0.0) & (not s.trained)
        worth = np.where(np.isnan(contribution), total, contribution)
        helps = worth > config.min_improvement_to_fossilize * noise
        may = s.masks.slot[envs, :, slot]
        keep = holding & ~ransom & helps & may[:, LifecycleOp.FOSSILIZE]
        useless = ~helps & (not s.trained)
        drop_it = (hurts | (holding & (ransom | useless))) & may[:, LifecycleOp.CULL]
        for decision, op in ((keep, LifecycleOp.FOSSILIZE), (drop_it, LifecycleOp.CULL)):
            chosen = occupied & decision
            actions[chosen, OP] = op
            actions[chosen, SLOT] = slot[chosen]
