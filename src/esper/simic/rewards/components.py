"""A reward as named terms for each environment, and their sum."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from esper.leyline.constants import SHAPED_RATIO_MIN_TOTAL
from esper.leyline.events import RewardHackingSuspected


@dataclass(frozen=True)
class Shaping:
    """A term [E] that only guides the learner, unlike terms that pay for the result."""

    value: np.ndarray


# The result of a reward function: terms by name, each float [E].
Terms = dict[str, np.ndarray | Shaping]


@dataclass(frozen=True)
class RewardComponents:
    """Raw rewards of one step of E environments; 0 for an environment that took no step.

    names       names of the k terms
    values      float64 [E, k]
    shaping     names of the shaping terms
    suspicions  seeds newly suspected of reward hacking in this step
    """

    names: tuple[str, ...]
    values: np.ndarray
    shaping: tuple[str, ...] = ()
    suspicions: tuple[RewardHackingSuspected, ...] = ()

    @staticmethod
    def of(
        terms: Terms, acted: np.ndarray, suspicions: tuple[RewardHackingSuspected, ...] = ()
    ) -> "RewardComponents":
        """Stack `terms`; raises ValueError if one is not finite where `acted`."""
        columns = [term.value if isinstance(term, Shaping) else term for term in terms.values()]
        shaping = tuple(name for name, term in terms.items() if isinstance(term, Shaping))
        values = np.where(acted[:, None], np.stack(columns, axis=1), 0.0)
        if not np.isfinite(values).all():
            env, k = np.argwhere(~np.isfinite(values))[0]
            raise ValueError(
                f"reward term {list(terms)[k]!r} of environment {env} is {values[env, k]}: "
                "the environment reported a score or loss that is not finite"
            )
        return RewardComponents(tuple(terms), values, shaping, suspicions)

    @cached_property
    def total(self) -> np.ndarray:
        """float64 [E]"""
        return self.values.sum(axis=1)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[:, self.names.index(name)]

    @property
    def shaped_ratio(self) -> np.ndarray:
        """[E]: |sum of shaping terms| / |total|, 0 where the total is almost 0."""
        shaping = sum((self[name] for name in self.shaping), np.zeros(len(self.values)))
        size = np.abs(self.total)
        known = size >= SHAPED_RATIO_MIN_TOTAL
        return np.where(known, np.abs(shaping) / np.where(known, size, 1.0), 0.0)
