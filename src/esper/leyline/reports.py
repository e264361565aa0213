"""Plain records that leave the training loop: one seed, one episode."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SeedStateReport:
    """One seed as it stands now. `None` means not measured, never zero.

    `shapley` is its share of what all seeds together are worth (in pp), exact if it has no error.
    """

    module: str
    slot_id: str
    blueprint: str
    blend: str
    stage: str
    previous_stage: str
    epochs_in_stage: int
    epochs_total: int
    alpha: float
    improvement_since_stage_start: float | None
    total_improvement: float | None
    counterfactual_contribution: float | None
    gradient_norm_ratio: float | None
    params: int
    is_healthy: bool
    shapley: float | None = None
    shapley_error: float | None = None

    def worth(self) -> dict[str, Any]:
        """What a summary says of a seed that was kept."""
        return {
            "blueprint": self.blueprint,
            "module": self.module,
            "slot_id": self.slot_id,
            "params": self.params,
            "contribution": self.counterfactual_contribution,
            "shapley": self.shapley,
            "shapley_error": self.shapley_error,
        }


@dataclass(frozen=True)
class TwinReport:
    """What insurance found and cost: how the same network ended without growth, and which of them
    was `kept`, "grown" or "twin"."""

    val_score: float | None
    train_macs: int
    kept: str


@dataclass(frozen=True)
class EpisodeOutcome:
    """One row of outcomes.jsonl: how one host training ended. Same key, same bytes.

    The network that is kept is the one of `best_step`; scores and sizes are its own.
    `params` and `macs` count the whole network, `seeds` its fossils and what else was kept.
    `train_macs` is the multiply-adds of all training and evaluation, rejected seeds included.
    `attribution_macs` is what it cost to find out, afterwards, what each seed is worth; nothing was
    decided by it. `total_reward` is the sum of raw rewards of `reward_mode`; None if nobody was
    rewarded. `ended` is finished, rollback, interrupted, patience or max_time. `twin` is there if
    the run was insured.
    """

    env: int
    key: int
    task: str
    controller: str
    steps: int
    ended: str
    best_step: int
    val_score: float | None
    val_loss: float | None
    host_params: int
    params: int
    host_macs: int
    macs: int
    train_macs: int
    germinated: int
    fossilized: int
    culled: int
    rollbacks: int
    seeds: tuple[SeedStateReport, ...]
    attribution_macs: int = 0
    total_reward: float | None = None
    reward_mode: str | None = None
    twin: TwinReport | None = None

    def summary(self, arm: str, test_score: float | None = None) -> dict[str, Any]:
        """A row of summary.json."""
        return {
            "arm": arm,
            "test_score": test_score,
            "val_score": self.val_score,
            "params": self.params,
            "macs": self.macs,
            "train_macs": self.train_macs,
            "attribution_macs": self.attribution_macs,
            "seeds": [seed.worth() for seed in self.seeds],
        }
