"""What a reward is made of: named parts for each environment, and their sum."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from esper.leyline.constants import SHAPED_RATIO_MIN_TOTAL
from esper.leyline.events import RewardHackingSuspected


@dataclass(frozen=True)
class RewardComponents:
    """Raw rewards of one step of E environments, part by part; 0 where no step was taken.

    names     k names
    values    float64 [E, k]
    hints     the names that only guide (shaping, action terms), as opposed to what counts
    suspicions  seeds that came under suspicion of reward hacking in this step
    """

    names: tuple[str, ...]
    values: np.ndarray
    hints: frozenset[str] = frozenset()
    suspicions: tuple[RewardHackingSuspected, ...] = ()

    @staticmethod
    def of(
        parts: dict[str, np.ndarray],
        acted: np.ndarray,
        hints: frozenset[str] = frozenset(),
        suspicions: tuple[RewardHackingSuspected, ...] = (),
    ) -> "RewardComponents":
        """Stack `parts` ([E] each); raises ValueError if one is not finite where `acted`."""
        values = np.where(acted[:, None], np.stack(list(parts.values()), axis=1), 0.0)
        if not np.isfinite(values).all():
            env, k = np.argwhere(~np.isfinite(values))[0]
            raise ValueError(
                f"reward component {list(parts)[k]!r} of environment {env} is {values[env, k]}: "
                "the environment reported a score or loss that is not finite"
            )
        return RewardComponents(tuple(parts), values, hints, suspicions)

    @cached_property
    def total(self) -> np.ndarray:
        """float64 [E]"""
        return self.values.sum(axis=1)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[:, self.names.index(name)]

    @property
    def shaped_ratio(self) -> np.ndarray:
        """[E] in [0, inf): |sum of hints| over |total|, 0 where the total is as good as 0."""
        hints = sum((self[name] for name in self.hints), np.zeros(len(self.values)))
        size = np.abs(self.total)
        known = size >= SHAPED_RATIO_MIN_TOTAL
        return np.where(known, np.abs(hints) / np.where(known, size, 1.0), 0.0)

    def rows(self, step: int, acted: np.ndarray) -> list[dict[str, Any]]:
        """Flat rows for the recorder, one for each environment that took the step."""
        ratio = self.shaped_ratio
        return [
            {"kind": "reward", "env": env, "step": step, "reward": float(self.total[env])}
            | {f"reward.{n}": float(v) for n, v in zip(self.names, self.values[env], strict=True)}
            | {"reward.shaped_ratio": float(ratio[env])}
            for env in np.flatnonzero(acted).tolist()
        ]
