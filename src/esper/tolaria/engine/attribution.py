"""What each seed contributes, as a cooperative game.

Players are seeds; the value of a coalition is the validation score of the network with only those
seeds. Leave-one-out and Shapley values (Shapley, 1953) are computed from one cache of such values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import factorial

import numpy as np

from esper.leyline import IS_BLENDED, generator
from esper.leyline.events import ShapleyComputed
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.garden import Validation

EXACT_PLAYERS = 5
PERMUTATION_PAIRS = 10


class CoalitionGame:
    """v(S) for coalitions of n players, each evaluated at most once.

    `evaluate` takes bool [K, n] and returns float [K]. The cache is valid for one state of one
    network: make a new game after any training.
    """

    def __init__(self, n_players: int, evaluate: Callable[[np.ndarray], np.ndarray]) -> None:
        self.n_players = n_players
        self._evaluate = evaluate
        self._known: dict[bytes, float] = {}

    @property
    def evaluations(self) -> int:
        return len(self._known)

    def know(self, coalition: np.ndarray, value: float) -> None:
        """Add a value that was measured before."""
        self._known[np.ascontiguousarray(coalition, dtype=bool).tobytes()] = float(value)

    def values(self, coalitions: np.ndarray) -> np.ndarray:
        """float [K] for bool [K, n]."""
        keys = [row.tobytes() for row in np.ascontiguousarray(coalitions, dtype=bool)]
        new = {key: i for i, key in enumerate(keys) if key not in self._known}
        if new:
            measured = self._evaluate(np.asarray(coalitions, dtype=bool)[list(new.values())])
            self._known.update(zip(new, np.asarray(measured, dtype=float).tolist(), strict=True))
        return np.array([self._known[key] for key in keys])


@dataclass(frozen=True)
class Attribution:
    """Values of n players, in the unit of the game; `standard_error` is None if they are exact."""

    leave_one_out: np.ndarray
    shapley: np.ndarray
    standard_error: np.ndarray | None
    evaluations: int


def attribute(game: CoalitionGame, key: int = 0, pairs: int = PERMUTATION_PAIRS) -> Attribution:
    """Exact up to EXACT_PLAYERS players, sampled for more, with draws that depend on `key` only."""
    if game.n_players <= EXACT_PLAYERS:
        shapley, error = exact_shapley(game), None
    else:
        shapley, error = sampled_shapley(game, key, pairs)
    return Attribution(leave_one_out(game), shapley, error, game.evaluations)


def leave_one_out(game: CoalitionGame) -> np.ndarray:
    """float [n]: v(all) - v(all but i)."""
    n = game.n_players
    values = game.values(np.concatenate([np.ones((1, n), dtype=bool), ~np.eye(n, dtype=bool)]))
    return values[0] - values[1:]


def exact_shapley(game: CoalitionGame) -> np.ndarray:
    """float [n]: the mean of each player's marginal gain over all orders, from all 2^n values."""
    n = game.n_players
    codes = np.arange(2**n)
    members = (codes[:, None] >> np.arange(n) & 1).astype(bool)
    values = game.values(members)
    size = members.sum(axis=1)
    weight = np.array([factorial(s) * factorial(n - s - 1) / factorial(n) for s in range(n)])
    result = np.empty(n)
    for i in range(n):
        without = codes[~members[:, i]]
        gains = values[without | 1 << i] - values[without]
        result[i] = weight[size[without]] @ gains
    return result


def sampled_shapley(game: CoalitionGame, key: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Estimates and standard errors, float [n], from `pairs` random orders and their reversals.

    An order and its reversal are one antithetic sample (Mitchell et al., 2022): where a player is
    early in one it is late in the other, so their mean varies less.
    """
    if pairs < 2:
        raise ValueError(f"a standard error needs at least 2 pairs of orders, got {pairs}")
    n, draw = game.n_players, generator(key, "shapley")
    orders = np.stack([draw.permutation(n) for _ in range(pairs)])
    samples = (_marginal_gains(game, orders) + _marginal_gains(game, orders[:, ::-1])) / 2.0
    return samples.mean(axis=0), samples.std(axis=0, ddof=1) / np.sqrt(pairs)


def _marginal_gains(game: CoalitionGame, orders: np.ndarray) -> np.ndarray:
    """float [P, n]: the gain of each player over those before it, for each order of `orders`."""
    count, n = orders.shape
    position = np.argsort(orders, axis=1)
    # prefixes[p, k]: the first k players of order p.
    prefixes = position[:, None, :] < np.arange(n + 1)[None, :, None]
    values = game.values(prefixes.reshape(-1, n)).reshape(count, n + 1)
    return np.take_along_axis(np.diff(values, axis=1), position, axis=1)


def attribute_seeds(
    cycle: GrowthCycle, env: int, known: Validation | None = None
) -> ShapleyComputed | None:
    """The contributions of the current seeds of one host; None if no seed acts on its output.

    Every value is an evaluation on the validation set; those in `known`, measured on the same
    network, are reused. The recorder gets the event too.
    """
    garden, slots = cycle.garden, np.flatnonzero(IS_BLENDED[cycle.table.stage[env]])
    if len(slots) == 0:
        return None
    macs = 0

    def evaluate(coalitions: np.ndarray) -> np.ndarray:
        nonlocal macs
        present = np.ones((len(coalitions), cycle.table.shape[1]), dtype=bool)
        present[:, slots] = coalitions
        envs = np.full(len(coalitions), env)
        found = cycle.population.evaluate(envs, present)
        macs += int(garden.coalition_macs(envs, present).sum()) * found.samples
        return found.score

    game = CoalitionGame(len(slots), evaluate)
    if known is not None and np.isfinite(known.score[env]):
        everyone = np.ones(len(slots), dtype=bool)
        game.know(everyone, known.score[env])
        for player, slot in enumerate(slots.tolist()):
            if np.isfinite(known.without_score[env, slot]):
                others = everyone & (np.arange(len(slots)) != player)
                game.know(others, known.without_score[env, slot])
    found = attribute(game, key=int(cycle.population.keys[env]))
    names, error = garden.event_log.slots, found.standard_error
    event = ShapleyComputed(
        env=env,
        step=cycle.step_count,
        modules=tuple(names.names[slot] for slot in slots),
        slot_ids=tuple(names.slot_ids[slot] for slot in slots),
        leave_one_out=tuple(found.leave_one_out.tolist()),
        shapley=tuple(found.shapley.tolist()),
        standard_error=None if error is None else tuple(error.tolist()),
        evaluations=found.evaluations,
        macs=macs,
    )
    cycle.recorder.event(event)
    return event
