"""What a reward is made of: named parts for each environment, and their sum."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from esper.leyline.constants import SHAPED_RATIO_MIN_TOTAL
from esper.leyline.events import RewardHackingSuspected


@dataclass(frozen=True)
class Hint:
    """A part [E] that only guides (shaping, action terms), as opposed to what counts."""

    value: np.ndarray


# What the function of a mode gives back: part by name, each float [E].
Parts = dict[str, np.ndarray | Hint]


@dataclass(frozen=True)
class RewardComponents:
    """Raw rewards of one step of E environments, part by part; 0 where no step was taken.

    names     k names
    values    float64 [E, k]
    hints     the names of the parts that only guide
    suspicions  seeds that came under suspicion of reward hacking in this step
    """

    names: tuple[str, ...]
    values: np.ndarray
    hints: tuple[str, ...] = ()
    suspicions: tuple[RewardHackingSuspected, ...] = ()

    @staticmethod
    def of(
        parts: Parts, acted: np.ndarray, suspicions: tuple[RewardHackingSuspected, ...] = ()
    ) -> "RewardComponents":
        """Stack `parts`; raises ValueError if one is not finite where `acted`."""
        columns = [part.value if isinstance(part, Hint) else part for part in parts.values()]
        hints = tuple(name for name, part in parts.items() if isinstance(part, Hint))
        values = np.where(acted[:, None], np.stack(columns, axis=1), 0.0)
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
