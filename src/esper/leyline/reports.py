"""Plain records: signals of a step, one seed, one episode; what few pairs cannot show."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TrainingSignals:
    """E host trainings after a step. Scores are in their own units; NaN means not measured.

    Arrays are [E], histories [E, 5], oldest first, NaN before the start. `loss_delta` and
    `score_delta` are positive for an improvement.
    """

    epoch: np.ndarray
    global_step: np.ndarray
    train_loss: np.ndarray
    val_loss: np.ndarray
    loss_delta: np.ndarray
    train_score: np.ndarray
    val_score: np.ndarray
    score_delta: np.ndarray
    plateau_epochs: np.ndarray
    host_stabilized: np.ndarray
    best_val_score: np.ndarray
    best_val_loss: np.ndarray
    loss_history: np.ndarray
    score_history: np.ndarray


@dataclass(frozen=True)
class SeedStateReport:
    """The state of one seed. `None` means not measured, never zero.

    `counterfactual_contribution` is that of the last measurement: on trial, at an audit or, with
    `shapley`, at the end. `shapley` is its share of the contribution of all seeds (in pp), exact
    without an error.
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

    def summary(self) -> dict[str, Any]:
        """The entry of a kept seed in summary.json."""
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
    """Insurance: the result of the same network without growth, and which of them was `kept`,
    "grown" or "twin". `gain` is the score of the grown one above the twin's."""

    val_score: float | None
    train_macs: int
    kept: str
    gain: float | None = None


@dataclass(frozen=True)
class EpisodeOutcome:
    """One row of outcomes.jsonl: the result of one host training. The same key gives the same row.

    The network of `best_step` is kept; scores and sizes are its own. `params` and `macs` count the
    whole network, `seeds` are the kept seeds. `train_macs` are the multiply-adds of all training
    and evaluation, including rejected seeds; `attribution_macs` those of measuring afterwards what
    each seed contributes. `total_reward` is the sum of raw rewards of `reward_mode`, None without
    rewards. `ended` is finished, rollback, interrupted, patience or max_time.
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
            "seeds": [seed.summary() for seed in self.seeds],
        }


SIGNIFICANT = 0.05


def few_pairs(pairs: int, comparisons: int) -> str | None:
    """One sentence if so few pairs can show no significant difference; None if they can.

    A sign-flip test of n pairs has 2^n patterns, so that its p-value is at least 2 / 2^n. Holm
    multiplies the smallest of the comparisons by their number.
    """

    def smallest(n: int) -> float:
        return min(1.0, comparisons * 2.0 ** (1 - n))

    if comparisons < 1 or (pairs > 1 and smallest(pairs) < SIGNIFICANT):
        return None
    needed = next(n for n in range(2, 100) if smallest(n) < SIGNIFICANT)
    if pairs < 2:
        return f"One pair has no interval and no p-value; significance needs {needed} pairs."
    holm = f" after Holm over {comparisons} comparisons" if comparisons > 1 else ""
    return (
        f"With {pairs} pairs no difference can be significant: the smallest possible p-value is "
        f"{smallest(pairs):.2g}{holm}; {needed} pairs are needed."
    )
