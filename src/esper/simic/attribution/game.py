"""The cooperative game behind attribution: players are seeds, the worth of a coalition is the
validation score of the network with only those seeds in it."""

from collections.abc import Callable

import numpy as np

from esper.growth import SlotTable
from esper.leyline import IS_BLENDED, ConfigError
from esper.tolaria import Population


class CoalitionGame:
    """v(S) for coalitions of n players, every one evaluated at most once.

    `evaluate` takes bool [K, n] and gives float [K]; it is asked for what is not yet known only.
    The cache holds for one state of one network: make a new game after any training.
    """

    def __init__(self, n_players: int, evaluate: Callable[[np.ndarray], np.ndarray]) -> None:
        self.n_players = n_players
        self._evaluate = evaluate
        self._known: dict[bytes, float] = {}

    @property
    def evaluations(self) -> int:
        return len(self._known)

    def values(self, coalitions: np.ndarray) -> np.ndarray:
        """float [K] for bool [K, n]."""
        if coalitions.ndim != 2 or coalitions.shape[1] != self.n_players:
            raise ValueError(
                f"coalitions must be [K, {self.n_players}], got {list(coalitions.shape)}"
            )
        keys = [row.tobytes() for row in np.ascontiguousarray(coalitions, dtype=bool)]
        new = {key: i for i, key in enumerate(keys) if key not in self._known}
        if new:
            measured = self._evaluate(np.asarray(coalitions, dtype=bool)[list(new.values())])
            self._known.update(zip(new, np.asarray(measured, dtype=float).tolist(), strict=True))
        return np.array([self._known[key] for key in keys])


def seed_game(
    population: Population, table: SlotTable, env: int
) -> tuple[CoalitionGame, np.ndarray]:
    """The game of one host's seeds that act on its output, and the slots they are in (int [n]).

    Every value is a real evaluation on the validation set.
    """
    slots = np.flatnonzero(IS_BLENDED[table.stage[env]])
    if len(slots) == 0:
        raise ConfigError(f"environment {env} has no seed that acts on its output")

    def evaluate(coalitions: np.ndarray) -> np.ndarray:
        present = np.ones((len(coalitions), table.shape[1]), dtype=bool)
        present[:, slots] = coalitions
        return population.evaluate(env, present).score

    return CoalitionGame(len(slots), evaluate), slots
